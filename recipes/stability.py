"""Learning rates that a tiny model survives, with and without control of its attention logits.

    python recipes/stability.py                    the default sweep, and its table and picture
    python recipes/stability.py --optimizer muon --attn sdpa

Random two-layer models read the bytes of the built-in novel at learning rates over three decades:

    default     nothing
    constant    queries and keys at 0.1 of the rate       hf_sigmoid.optim.QuacK(rule="constant")
    quack       their rates follow each other's weights   hf_sigmoid.optim.QuacK
    qk-norm     queries and keys are normed (qwen3 of the same size)

A constant rate after a warm-up of a tenth, as Anson & Aitchison 2025, arXiv 2511.21377 (they train
1B parameters under Muon); no weight decay, no clipping of gradients. A run has failed if a loss is
not finite, or its held-out loss ends no better than that of the text's byte frequencies. Runs are
appended to a file and never made twice: the same command goes on where it was stopped.
"""

import argparse
import contextlib
import functools
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from hf_sigmoid import files, text
from hf_sigmoid.errors import BadInput
from hf_sigmoid.files import write_file, write_text
from hf_sigmoid.training import script

with script.loading():
    import pandas as pd
    import torch
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    from hf_sigmoid.conversions.report import table
    from hf_sigmoid.logit_control.monitor import Health
    from hf_sigmoid.optim import QuacK, find_heads

RESULTS = Path(__file__).with_name("results")
METHODS = ("default", "constant", "quack", "qk-norm")
RATES = tuple(float(f"{10 ** (n / 2):.2g}") for n in range(-6, 1))  # 0.001 to 1
SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
ADAM_RATE = 3e-3  # of what Muon does not train: embeddings, the output matrix and norms
PROBED_STEPS = 10  # between two looks at the logits


def main(argv: list[str] | None = None) -> None:
    """Raises BadInput for options that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--attn", default="ssmax", help="ssmax, sigmoid or sdpa")
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "muon"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the three files")
    parser.add_argument("--quick", action="store_true", help="seconds: a few steps at two rates")
    args = parser.parse_args(argv)
    if min(args.steps, args.seeds, args.jobs) < 1:
        raise BadInput(
            "--steps, --seeds and --jobs: expected at least 1 of each, got "
            f"{args.steps}, {args.seeds} and {args.jobs}"
        )
    files.check_folder(args.out, "--out")
    try:
        build({"attn": args.attn, "seed": 0, "method": METHODS[0]})
    except (ValueError, ImportError) as error:
        raise BadInput(f"--attn {args.attn}: {error}") from error
    steps, seeds, rates = args.steps, range(args.seeds), RATES
    if args.quick:
        steps, seeds, rates = PROBED_STEPS, range(1), (RATES[2], RATES[-1])
    wanted = [
        {"attn": args.attn, "optimizer": args.optimizer, "steps": steps, "method": method,
         "lr": lr, "seed": seed}
        for seed in seeds for lr in rates for method in METHODS
    ]  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "stability.jsonl"
    sweep(wanted, file, args.jobs)
    report(load(file), args.out)
    print(f"{args.out / 'stability.md'}, {args.out / 'stability.png'}")


def sweep(wanted: list[dict[str, Any]], file: Path, jobs: int) -> None:
    """Make the runs that the file does not have."""
    done = {_key(row) for row in load(file)}
    missing = [run for run in wanted if _key(run) not in done]
    bar = tqdm(total=len(wanted), initial=len(wanted) - len(missing), unit="run")
    with bar, file.open("a+", encoding="utf-8") as log:
        log.seek(0)
        if (content := log.read()) and not content.endswith("\n"):
            log.write("\n")  # after a line that a crash cut off
        for row in _made(missing, jobs):
            log.write(json.dumps(row) + "\n")
            log.flush()
            bar.update()


def _made(runs: list[dict[str, Any]], jobs: int) -> Iterator[dict[str, Any]]:
    if jobs <= 1 or len(runs) <= 1:
        yield from map(train, runs)
        return
    # Spawned: a fork would share this process's threads. One thread a run, the matrices are small.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        jobs, context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        try:
            for future in as_completed([pool.submit(train, run) for run in runs]):
                yield future.result()
        except KeyboardInterrupt:
            # Or the pool would make all the other runs first.
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def load(file: Path) -> list[dict[str, Any]]:
    """Finished runs; a line that was cut off by a crash is none."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def train(run: dict[str, Any]) -> dict[str, Any]:
    """One run, with its results: held-out loss before and after, and the largest logit seen."""
    model = build(run)
    optimizers = _optimizers(model, run)
    rates = [group["lr"] for each in optimizers for group in each.param_groups]
    generator = torch.Generator().manual_seed(run["seed"])
    novel, evaluation = texts()
    health = Health(model, evaluation[:2, :64])
    first, largest = _loss(model, evaluation).item(), 0.0
    finite = True
    for step in range(1, run["steps"] + 1):
        starts = torch.randint(len(novel) - 65, (16, 1), generator=generator)
        loss = _loss(model, novel[starts + torch.arange(65)], train=True)
        loss.backward()
        factor = min(1.0, step / max(1, run["steps"] // 10))
        groups = [group for each in optimizers for group in each.param_groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        finite = math.isfinite(loss.item())
        if step % PROBED_STEPS == 0 and finite:
            tops = [each["max_logit"].max().item() for each in health.measure().values()]
            largest = max([largest, *(top for top in tops if math.isfinite(top))])
        if not finite:
            break
    last = _loss(model, evaluation).item()
    finite = finite and math.isfinite(last)
    return {
        **run, "first": round(first, 4), "loss": round(last, 4) if finite else None,
        "max_logit": float(f"{largest:.4g}"),
    }  # fmt: skip


def texts():
    """Bytes to train on `[N]`, and held-out ones `[64, 65]`."""
    novel, held_out = (
        torch.frombuffer(bytearray(each.encode()), dtype=torch.uint8).long()
        for each in (text.train(), text.held_out())
    )
    return novel, held_out[: 64 * 65].view(64, 65)


@functools.cache
def frequencies() -> float:
    """Held-out nats a byte of a model that knows how often each byte is, and nothing of order."""
    novel, evaluation = texts()
    counts = novel.bincount(minlength=256).double() + 1
    return -(counts / counts.sum()).log()[evaluation[:, 1:]].mean().item()


def failed(run: dict[str, Any]) -> bool:
    return run["loss"] is None or run["loss"] >= frequencies()


def build(run: dict[str, Any]):
    """The random model of a run: the same numbers for every method."""
    torch.manual_seed(run["seed"])
    config = Qwen3Config(**SIZES) if run["method"] == "qk-norm" else LlamaConfig(**SIZES)
    return AutoModelForCausalLM.from_config(config, attn_implementation=run["attn"]).train()


def _optimizers(model, run: dict[str, Any]) -> list:
    """All of it under AdamW; or hidden matrices under Muon, whose rate alone is swept."""
    control = {"constant": {"tau": 0.1, "rule": "constant"}, "quack": {}}.get(run["method"])
    heads = find_heads(model, torch.arange(8)[None]) if control is not None else None
    adam = {"betas": (0.9, 0.95), "weight_decay": 0.0}
    if run["optimizer"] == "adamw":
        optimizers = [torch.optim.AdamW(model.parameters(), lr=run["lr"], **adam)]
    else:
        hidden = [p for name, p in model.named_parameters() if p.dim() == 2 and ".layers." in name]
        known = {id(p) for p in hidden}
        rest = [p for p in model.parameters() if id(p) not in known]
        optimizers = [
            torch.optim.Muon(hidden, lr=run["lr"], weight_decay=0.0),
            torch.optim.AdamW(rest, lr=ADAM_RATE, **adam),
        ]
    if heads is not None:
        QuacK(optimizers[0], heads, **control)
    return optimizers


def _loss(model, blocks, *, train: bool = False):
    """Nats a byte of `[B, T + 1]`."""
    with torch.set_grad_enabled(train):
        logits = model(blocks[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())


def report(rows: list[dict[str, Any]], folder: Path) -> None:
    """The table and the picture of all runs of the file."""
    worst = frequencies()
    runs = pd.DataFrame(rows)
    runs["failed"] = [failed(row) for row in rows]
    runs["method"] = pd.Categorical(runs["method"], METHODS, ordered=True)
    sweeps = dict(list(runs.groupby(["optimizer", "attn", "steps"], sort=False)))
    lines = [
        "Made by `recipes/stability.py`: held-out loss in nats a byte, by learning rate. Failed: "
        f"not finite, or no better than the frequencies of bytes ({worst:.3f})."
    ]
    for (optimizer, attn, steps), found in sweeps.items():
        lines += ["", f"## {optimizer}, {attn}, {steps} steps", ""]
        lines += _table(found, "Held-out loss, mean over seeds", _mean_loss)
        lines += ["", *_table(found, "Largest logit, greatest over seeds", _largest_logit)]
    write_text(folder / "stability.md", "\n".join(lines) + "\n")
    _picture(sweeps, worst, folder / "stability.png")


def _table(runs: pd.DataFrame, title: str, cell: Callable[[pd.DataFrame], str]) -> list[str]:
    rates = sorted(runs["lr"].unique())
    cells = {key: cell(found) for key, found in runs.groupby(["method", "lr"], observed=True)}
    rows = [[name, *(cells.get((name, lr), "–") for lr in rates)] for name in METHODS]
    return table([title, *(f"{lr:g}" for lr in rates)], rows)


def _mean_loss(runs: pd.DataFrame) -> str:
    """The mean of the seeds that did not fail, and how many did."""
    failures, losses = runs["failed"].sum(), runs["loss"][~runs["failed"]]
    note = f"{failures} of {len(runs)} failed" if failures else ""
    return " ".join(filter(None, [f"{losses.mean():.3f}" if len(losses) else "", note]))


def _largest_logit(runs: pd.DataFrame) -> str:
    return f"{runs['max_logit'].max():.3g}"


def _picture(sweeps: dict[tuple, pd.DataFrame], worst: float, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        len(sweeps), 2, figsize=(10, 3.8 * len(sweeps)), squeeze=False, layout="constrained"
    )
    for (left, right), ((optimizer, attn, steps), runs) in zip(axes, sweeps.items(), strict=True):
        shown = runs.assign(
            loss=runs["loss"].mask(runs["failed"], worst).astype(float),
            max_logit=runs["max_logit"].clip(lower=1e-2),
        )
        for method, mine in shown.groupby("method", observed=True):
            rates = mine.groupby("lr")
            losses = rates["loss"].agg(["mean", "min", "max"])
            (line,) = left.plot(losses["mean"], "o-", label=method)
            spread = (losses.index, losses["min"], losses["max"])
            left.fill_between(*spread, alpha=0.15, color=line.get_color())
            right.plot(rates["max_logit"].max(), "o-", label=method)
        left.axhline(worst, color="grey", linewidth=0.8, linestyle=":")
        left.set_title(f"{optimizer}, {attn}, {steps} steps")
        left.set_ylabel("held-out loss, nats a byte (dotted: failed)")
        right.set(yscale="log", ylabel="largest logit on the probe")
        for axis in (left, right):
            axis.set(xscale="log", xlabel="learning rate")
            axis.grid(alpha=0.3)
        left.legend()
    write_file(file, lambda place: figure.savefig(place, format="png", dpi=110))
    plt.close(figure)


def _key(run: dict[str, Any]) -> tuple:
    return tuple(run[k] for k in ("attn", "optimizer", "steps", "method", "lr", "seed"))


if __name__ == "__main__":
    script.run(main)
