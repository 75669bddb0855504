"""The main job from end to end on the embedded SmolLM2-135M: `make demo`.

Convert to ssmax and to sigmoid, train each on for a few steps, measure perplexity on held-out
chapters, and hide needles from all of them side by side. Every step is a command that a user would
type; what is already there from an earlier run is kept, so an interrupted demonstration goes on
where it stopped.
"""

import argparse
import json
import time
from pathlib import Path

from hf_sigmoid.training import script

with script.loading():
    import torch
    from stages import Steps
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from hf_sigmoid import text
    from hf_sigmoid.conversions import checkpoint, perplexity, token_windows
    from hf_sigmoid.evals.commands import main as evaluate
    from hf_sigmoid.loading import load_model

OUT = Path("runs/demo")
FUNCTIONS = ("ssmax", "sigmoid")
STEPS, BLOCK = 10, 256
WINDOW, WINDOWS = 512, 8  # of both texts of a conversion, and of the last perplexity
LENGTHS, DEPTHS, SAMPLES = ("256", "512"), ("0", "0.5", "1"), "2"


def main() -> None:
    """Run every step, then print one table and the path of the heatmap."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    start = time.perf_counter()
    logging.set_verbosity_error()
    print("[1/4] SmolLM2-135M from its package", flush=True)
    models = {"softmax": checkpoint("smollm2")}
    stages = Steps(OUT)
    print("[2/4] conversions, each trained on", flush=True)
    for function in FUNCTIONS:
        stages.run(
            function, "hf-sigmoid", "convert", "smollm2", "OUT", "--to", function,
            "--window", str(WINDOW), "--windows", str(WINDOWS), "--evaluate", "builtin",
        )  # fmt: skip
        stages.run(
            f"{function}-trained", "python", "recipes/continue_pretrain.py",
            "--config", f"recipes/{function}/continue.yaml", f"model={OUT / function}",
            "output_dir=OUT", f"train.steps={STEPS}", f"train.block_size={BLOCK}",
            "train.batch_size=2", "train.grad_accumulation=1", "optim.warmup_steps=2",
            "checkpoint.every=5",
        )  # fmt: skip
        models[function] = str(OUT / f"{function}-trained/final")
    print("[3/4] perplexity on the held-out chapters", flush=True)
    after = {name: _perplexity(name, path) for name, path in models.items()}
    print("[4/4] needles in a novel", flush=True)
    summary = evaluate(
        ["--models", "smollm2", *list(models.values())[1:], "--lengths", *LENGTHS,
         "--depths", *DEPTHS, "--samples", SAMPLES, "--out", str(OUT / "needle")]
    )  # fmt: skip
    _print_table(after, summary)
    print(f"heatmap: {OUT / 'needle/heatmap.png'}")
    print(f"{time.perf_counter() - start:.0f} seconds")


def _perplexity(name: str, path: str) -> float:
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = load_model(path, dtype=torch.float32)
    windows = token_windows(tokenizer, text.held_out(), WINDOW, WINDOWS)
    return perplexity(model, windows, name=name)


def _print_table(after: dict[str, float], summary: dict) -> None:
    print(f"\n{'attention':10} {'converted':>10} {'trained':>10} {'needles':>8} {'log-prob':>9}")
    for (name, trained), model in zip(after.items(), summary["models"], strict=True):
        converted, cells = trained, model["lengths"]
        if name in FUNCTIONS:
            report = json.loads((OUT / name / "report.json").read_text("utf-8"))
            converted = report["perplexity_after"]
        found = f"{sum(cell['correct'] for cell in cells)}/{sum(cell['n'] for cell in cells)}"
        logprob = sum(cell["logprob"] for cell in cells) / len(cells)
        print(f"{name:10} {converted:10.2f} {trained:10.2f} {found:>8} {logprob:9.2f}")
    print(f"perplexity as converted, then after {STEPS} steps; needles found, mean log-probability")


if __name__ == "__main__":
    script.run(main)
