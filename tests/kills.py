"""Kill a training run at random moments with SIGKILL, resume it, and compare with one left alone.

    python tests/kills.py --kills 50

The run is evaluated, looked at, controlled (QuacK) and saved every third step, so that a moment
falls into any of it. It is started again until it ends, and its log and its final weights must be
those of the run that was left alone, to the last bit.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tiny_models
from tqdm import tqdm
from training_runs import RECIPES, arguments, measured, same_weights

from hf_sigmoid import text

KEYS = {
    "attn": "ssmax", "train.steps": 120, "checkpoint.every": 3, "optim.qk_tau": 1.0,
    "evaluate.path": "builtin", "evaluate.every": 10, "evaluate.windows": 2,
    "evaluate.needle": "[250]", "evaluate.health_every": 5,
}  # fmt: skip


def main(argv: list[str] | None = None) -> dict[str, int]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        counts = kill_and_compare(Path(folder), args.kills, random.Random(args.seed))
    print(json.dumps(counts))
    return counts


def kill_and_compare(folder: Path, kills: int, moments: random.Random) -> dict[str, int]:
    """Raises AssertionError for a run that is not the one that was left alone."""
    model, corpus = str(folder / "model"), folder / "corpus.txt"
    tiny = tiny_models.byte_llama(model)
    tiny.config.attention_dropout, tiny.config.max_position_embeddings = 0.1, 512
    tiny.save_pretrained(model)
    corpus.write_text(text.train()[:40_000], encoding="utf-8")
    command = [sys.executable, str(RECIPES / "continue_pretrain.py")]
    alone = folder / "alone"
    started = time.monotonic()
    subprocess.run(
        [*command, *arguments(model, str(corpus), alone, **KEYS)], check=True, capture_output=True
    )
    seconds = time.monotonic() - started
    counts = {"kills": 0, "runs": 0, "resumed": 0, "unfinished_folders": 0}
    bar = tqdm(total=kills, unit="kill")
    while counts["kills"] < kills:
        out = folder / f"run_{counts['runs']}"
        counts["runs"] += 1
        while True:
            run = subprocess.Popen(
                [*command, *arguments(model, str(corpus), out, **KEYS)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            try:
                alive = 900 if counts["kills"] == kills else moments.uniform(0, seconds)
                said, errors = run.communicate(timeout=alive)
            except subprocess.TimeoutExpired:
                run.kill()
                said, _ = run.communicate()
                assert run.returncode == -signal.SIGKILL
                counts["kills"] += 1
                bar.update()
                counts["unfinished_folders"] += any(out.rglob("*.tmp")) if out.exists() else 0
            else:
                assert run.returncode == 0, errors
                break
            finally:
                counts["resumed"] += "resuming after step" in said
        _compare(out, alone)
    bar.close()
    return counts


def _compare(out: Path, alone: Path) -> None:
    assert measured(out) == measured(alone), "the logs differ"
    assert same_weights(out / "final", alone / "final"), "the weights differ"


if __name__ == "__main__":
    main()
