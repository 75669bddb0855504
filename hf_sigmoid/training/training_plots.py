"""The curves of a run: what `log.jsonl` holds, as PNG files.

python recipes/training_plots.py runs/ssmax
"""

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_sigmoid.errors import BadInput
from hf_sigmoid.training import run_log, script

FOLDER = "plots"


def check() -> None:
    """Refuse before the training what would fail after it."""
    if find_spec("matplotlib") is None:
        raise BadInput("--plot: matplotlib is not installed: pip install matplotlib")


def draw(run: Path) -> list[Path]:
    """`run/plots/training.png` and, if attention was looked at, `attention.png`.

    Raises:
        BadInput: a folder without a log, or with an empty one.
    """
    file = run / "log.jsonl"
    if not file.is_file():
        raise BadInput(f"{run}: expected the output_dir of a run, got no log.jsonl in it")
    lines = run_log.read(file)
    if not lines:
        raise BadInput(f"{file}: expected a line a step, got none")
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    written = [_training(lines, folder / "training.png")]
    looked = [line for line in lines if "health" in line]
    if looked:
        written.append(_attention(looked, folder / "attention.png"))
    return written


def _training(lines: list[dict[str, Any]], file: Path) -> Path:
    figure, ((loss, rates), (norm, speed)) = _figure(2, 2)
    steps = [line["step"] for line in lines]
    loss.plot(steps, _values(lines, "loss"), color="0.7", lw=1, label="training, each step")
    loss.plot(steps, _smooth(_values(lines, "loss")), color="C0", label="training, running mean")
    before = lines[0].get("before") or {}
    for number, (name, points) in enumerate(_evaluated(lines, before, "held_out").items()):
        style = {"color": f"C{number + 1}", "label": f"held out: {name}", "ms": 3}
        loss.plot(*zip(*points, strict=True), "o-", **style)
    loss.set(ylabel="cross entropy (nats a token)")
    loss.legend(frameon=False, fontsize=8, loc="lower left")
    found = None
    for number, (length, points) in enumerate(_evaluated(lines, before, "needle").items()):
        if found is None:
            found = loss.twinx()
            found.set(ylabel="needles found (dashed)", ylim=(-0.03, 1.03))
        found.plot(*zip(*points, strict=True), "--", color="0.4", lw=1)
        found.annotate(
            f"{length} tokens", points[-1], (0, -9 - 8 * number), fontsize=7, ha="right",
            textcoords="offset points",
        )  # fmt: skip

    rates.plot(steps, _values(lines, "lr"), label="base rate")
    if any("qk_lr" in line for line in lines):
        least, most = zip(*(line.get("qk_lr") or (None, None) for line in lines), strict=True)
        rates.fill_between(
            steps, [_number(v) for v in least], [_number(v) for v in most],
            alpha=0.3, color="C1", label="W_Q and W_K, least to largest",
        )  # fmt: skip
    rates.set(ylabel="learning rate")
    rates.legend(frameon=False, fontsize=8)
    norm.semilogy(steps, _values(lines, "grad_norm"), lw=1)
    skipped = [line["step"] for line in lines if line["loss"] is None]
    for step in skipped:
        norm.axvline(step, color="C3", lw=0.8)
    norm.set(ylabel="gradient norm", xlabel="step")
    if skipped:
        norm.set_title(f"{len(skipped)} steps skipped (red)", fontsize=9)
    speed.plot(steps, _values(lines, "tok_s"), lw=1)
    speed.set(ylabel="tokens a second", xlabel="step", ylim=(0, None))
    return _save(figure, file)


def _evaluated(
    lines: list[dict[str, Any]], before: dict[str, Any], kind: str
) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of everything that was evaluated, by its name."""
    points: dict[str, list[tuple[int, float]]] = {}
    for step, values in [(0, before), *((line["step"], line) for line in lines)]:
        for name, value in (values.get(kind) or {}).items():
            points.setdefault(name, []).append((step, _number(value)))
    return points


def _attention(lines: list[dict[str, Any]], file: Path) -> Path:
    """A line a layer, the first dark and the last bright."""
    import matplotlib

    kinds = {
        "max_logit": "largest logit of any head", "mean_change": "mean |Δ logit| since last time",
        "row_sum": "sum of a row's weights", "saturated": "rows with a weight above 0.99",
        "offset": "row number: offset", "slope": "row number: slope",
    }  # fmt: skip
    kinds = {
        kind: label for kind, label in kinds.items()
        if any(_known(line["health"].get(kind)) for line in lines)
    }  # fmt: skip
    figure, axes = _figure((len(kinds) + 1) // 2, 2)
    for axis, (kind, label) in zip(axes.flat, kinds.items(), strict=False):
        layers = max(len(line["health"][kind]) for line in lines)
        colors = matplotlib.colormaps["viridis"]
        for layer in range(layers):
            points = [(line["step"], _number(line["health"][kind][layer])) for line in lines]
            axis.plot(*zip(*points, strict=True), lw=1, color=colors(layer / max(1, layers - 1)))
        axis.set(ylabel=label, xlabel="step")
    for axis in list(axes.flat)[len(kinds) :]:
        axis.axis("off")
    figure.suptitle(
        "attention on a fixed batch, a line a layer (first dark, last bright)", fontsize=10
    )
    return _save(figure, file)


def _figure(rows: int, columns: int) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(
        rows, columns, figsize=(5.2 * columns, 3.2 * rows), squeeze=False, layout="constrained"
    )


def _save(figure: Any, file: Path) -> Path:
    from matplotlib import pyplot

    for axis in figure.axes:
        axis.spines["top"].set_visible(False)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return file


def _values(lines: list[dict[str, Any]], key: str) -> list[float]:
    return [_number(line.get(key)) for line in lines]


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _known(values: list[float | None] | None) -> bool:
    return any(value is not None for value in values or [])


def _smooth(values: list[float], share: float = 0.9) -> list[float]:
    """Exponential running mean, unbiased at its start; gaps do not count."""
    mean, weight, smooth = 0.0, 0.0, []
    for value in values:
        if value == value:
            mean, weight = share * mean + (1 - share) * value, share * weight + 1 - share
        smooth.append(mean / weight if weight else float("nan"))
    return smooth


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="the output_dir of a run")
    check()
    for file in draw(parser.parse_args(argv).run):
        print(file)


if __name__ == "__main__":
    script.run(main)
