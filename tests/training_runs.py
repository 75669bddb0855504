"""What the tests of the recipes share: the recipes on the path, command lines, logs."""

import json
import os
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes"
sys.path.insert(0, str(RECIPES))

POSITIONS = 512
BLOCK = 48


def arguments(tiny: str, corpus_file: str, out: Path, **keys) -> list[str]:
    values = {
        "model": tiny,
        "output_dir": out,
        "data.path": corpus_file,
        "train.steps": 9,
        "train.block_size": BLOCK,
        "train.batch_size": 2,
        "train.grad_accumulation": 2,
        "optim.lr": 3e-3,
        "checkpoint.every": 3,
        **keys,
    }
    return [f"{key}={value}" for key, value in values.items()]


def losses(out: Path) -> list[float]:
    """The logged losses, after checking that every step is there once."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def lines(out: Path) -> list[dict]:
    """The lines of a run's log."""
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def launch(
    argv: list[str], *, processes: int = 2, recipe: str = "continue_pretrain.py", **environment: str
) -> str:
    """A recipe in several gloo processes; what they printed."""
    command = [
        "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes),
        "--main_process_port", "0", "--num_machines", "1", "--mixed_precision", "no",
        str(RECIPES / recipe),
    ]  # fmt: skip
    # --cpu would start one process without a word.
    own = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, *command, *argv], env={**os.environ, **own}, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def work(jobs: list[tuple[dict[str, str], list[str], int]], *, processes: int) -> None:
    """`training_worker.py` in several gloo processes, which are started once for all jobs."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
        str(Path(__file__).with_name("training_worker.py")), json.dumps(jobs),
    ]  # fmt: skip
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-6000:]
