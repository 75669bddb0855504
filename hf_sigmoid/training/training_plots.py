"""The curves of a run: what `log.jsonl` holds, as PNG files."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_sigmoid.errors import BadInput
from hf_sigmoid.training import run_log
from hf_sigmoid.training.trackers import need

if TYPE_CHECKING:
    from pandas import DataFrame, Series

FOLDER = "plots"
KINDS = {
    "max_logit": "largest logit of any head", "mean_change": "mean |Δ logit| since last time",
    "row_sum": "sum of a row's weights", "saturated": "rows with a weight above 0.99",
    "offset": "per-query term: offset", "slope": "per-query term: slope",
}  # fmt: skip


def check() -> None:
    """Refuse before the training what would fail after it."""
    need("matplotlib", "--plot")


def draw(run: Path) -> list[Path]:
    """`run/plots/training.png` and, if attention was looked at, `attention.png`.

    Raises:
        BadInput: a folder without a log, or with an empty one.
    """
    import matplotlib
    import pandas

    file = run / "log.jsonl"
    if not file.is_file():
        raise BadInput(f"{run}: expected the output_dir of a run, got no log.jsonl in it")
    if not (lines := run_log.read(file)):
        raise BadInput(f"{file}: expected a line a step, got none")
    matplotlib.use("Agg")
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    # Nested values by their path, and null as no value.
    frame = pandas.json_normalize(lines, sep="/").set_index("step").convert_dtypes()
    written = [_training(frame, folder / "training.png")]
    layers = {}
    for kind in KINDS:
        if (name := f"health/{kind}") in frame:
            found = frame[name].dropna()
            table = pandas.DataFrame(found.tolist(), index=found.index, dtype=float)
            if table.notna().any(axis=None):
                layers[kind] = table
    return [*written, _attention(layers, folder / "attention.png")] if layers else written


def _training(frame: "DataFrame", file: Path) -> Path:
    figure, ((loss, rates), (norm, speed)) = _figure(2, 2)
    values = frame["loss"].astype(float)
    smooth = values.ewm(alpha=0.1, ignore_na=True).mean()
    loss.plot(values, color="0.7", lw=1, label="training, each step")
    loss.plot(smooth, color="C0", label="training, running mean")
    for number, (name, points) in enumerate(_evaluated(frame, "held_out"), 1):
        loss.plot(points, "o-", ms=3, color=f"C{number}", label=f"held out: {name}")
    loss.set(ylabel="cross entropy (nats a token)")
    loss.legend(frameon=False, fontsize=8, loc="lower left")
    if needles := _evaluated(frame, "needle"):
        found = loss.twinx()
        found.set(ylabel="needles found (dashed)", ylim=(-0.03, 1.03))
        for number, (length, points) in enumerate(needles):
            found.plot(points, "--", color="0.4", lw=1)
            found.annotate(
                f"{length} tokens", (points.index[-1], points.iloc[-1]), (0, -9 - 8 * number),
                fontsize=7, ha="right", textcoords="offset points",
            )  # fmt: skip
    rates.plot(frame["lr"], label="base rate")
    if "qk_lr" in frame:
        least, most = (frame["qk_lr"].dropna().map(lambda pair, i=i: pair[i]) for i in (0, 1))
        label = "W_Q and W_K, least to largest"
        rates.fill_between(least.index, least, most, alpha=0.3, color="C1", label=label)
    rates.set(ylabel="learning rate")
    rates.legend(frameon=False, fontsize=8)
    norm.semilogy(frame["grad_norm"].astype(float), lw=1)
    norm.set(ylabel="gradient norm", xlabel="step")
    if len(skipped := values.index[values.isna()]):
        for step in skipped:
            norm.axvline(step, color="C3", lw=0.8)
        norm.set_title(f"{len(skipped)} steps skipped (red)", fontsize=9)
    speed.plot(frame["tok_s"], lw=1)
    speed.set(ylabel="tokens a second", xlabel="step", ylim=(0, None))
    return _save(figure, file)


def _evaluated(frame: "DataFrame", kind: str) -> list[tuple[str, "Series"]]:
    """Each thing that was evaluated by its name: its values by the step, 0 before the first."""
    found = []
    for column in frame.columns:
        if column.startswith(f"{kind}/"):
            points = frame[column].dropna().astype(float)
            if f"before/{column}" in frame:
                points.loc[0] = frame[f"before/{column}"].iloc[0]
            found.append((column.partition("/")[2], points.sort_index()))
    return found


def _attention(layers: dict[str, "DataFrame"], file: Path) -> Path:
    """A line a layer, the first dark and the last bright."""
    figure, axes = _figure((len(layers) + 1) // 2, 2)
    for axis, (kind, table) in zip(axes.flat, layers.items(), strict=False):
        table.plot(ax=axis, colormap="viridis", legend=False, lw=1)
        axis.set(ylabel=KINDS[kind], xlabel="step")
    for axis in axes.flat[len(layers) :]:
        axis.axis("off")
    title = "attention on a fixed batch, a line a layer (first dark, last bright)"
    figure.suptitle(title, fontsize=10)
    return _save(figure, file)


def _figure(rows: int, columns: int) -> Any:
    from matplotlib import pyplot

    size = (5.2 * columns, 3.2 * rows)
    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def _save(figure: Any, file: Path) -> Path:
    from matplotlib import pyplot

    for axis in figure.axes:
        axis.spines["top"].set_visible(False)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return file


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the output_dir of a run")
    check()
    for file in draw(parser.parse_args(argv).run):
        print(file)
