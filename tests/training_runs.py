"""What the tests of the recipes share: the recipes on the path, command lines, logs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from hf_sigmoid.errors import BadInput
from hf_sigmoid.training import run_log

RECIPES = Path(__file__).parents[1] / "recipes"
sys.path.insert(0, str(RECIPES))

POSITIONS = 512
BLOCK = 48
WAIT = 120  # seconds, for what takes some
ON_CPU = {"ACCELERATE_USE_CPU": "true"}


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


def tensors(folder: Path | str) -> dict[str, torch.Tensor]:
    """The weights of a saved model."""
    return load_file(Path(folder) / "model.safetensors")


def same_weights(one: Path | str, other: Path | str) -> bool:
    """Whether two saved models have the same bits."""
    ours, theirs = tensors(one), tensors(other)
    return all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


def measured(out: Path) -> list[dict]:
    """Everything in a log but how fast it was."""
    fast = ("tok_s", "tok_s_process", "tflop_s", "mfu", "memory_gb")
    return [{k: v for k, v in line.items() if k not in fast} for line in lines(out)]


def signal_after(monkeypatch, step: int, *numbers: int) -> None:
    """This process gets signals once it has logged a step."""
    write = run_log.RunLog.write

    def write_and_ask(self, **values):
        write(self, **values)
        if values["step"] == step:
            for number in numbers:
                os.kill(os.getpid(), number)

    monkeypatch.setattr(run_log.RunLog, "write", write_and_ask)


def in_two_parts(monkeypatch, main, argv: list[str], step: int) -> Path:
    """A run that SIGTERM stops after a step, and the same command again; the final folder."""
    signal_after(monkeypatch, step, signal.SIGTERM)
    assert main(argv) is None
    monkeypatch.undo()
    return main(argv)


def refused(main, argv: list[str], words: str) -> None:
    """The command is refused, and says so."""
    with pytest.raises(BadInput) as error:
        main(argv)
    assert words in str(error.value)


def killed(code: str, *given) -> None:
    """A process that kills itself."""
    job = [sys.executable, "-c", code, json.dumps(given)]
    ended = subprocess.run(job, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def launcher(processes: int, recipe: str = "continue_pretrain.py") -> list[str]:
    """Arguments of Python that start a recipe in some gloo processes."""
    # --cpu would start one process without a word.
    several = ["--multi_gpu", "--main_process_port", "0"] if processes > 1 else []
    return [
        "-m", "accelerate.commands.launch", "--num_processes", str(processes), *several,
        "--num_machines", "1", "--mixed_precision", "no", str(RECIPES / recipe),
    ]  # fmt: skip


def launch(
    argv: list[str], *, processes: int = 2, recipe: str = "continue_pretrain.py", **environment: str
) -> str:
    """A recipe in several gloo processes; what they printed."""
    run = started(*launcher(processes, recipe), *argv, **ON_CPU, **environment)
    said, errors = run.communicate(timeout=600)
    assert run.returncode == 0, errors[-5000:]
    return said


def started(*command: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, start_new_session=True,
        cwd=RECIPES.parent,
    )  # fmt: skip


def until(met, run: subprocess.Popen) -> None:
    end = time.monotonic() + WAIT
    while not met():
        assert run.poll() is None and time.monotonic() < end
        time.sleep(0.05)


def steps(out: Path) -> int:
    log = out / "log.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def workers_of(run: subprocess.Popen) -> list[psutil.Process]:
    """The processes that a launcher has started."""
    children = psutil.Process(run.pid).children(recursive=True)
    return [each for each in children if str(RECIPES / "continue_pretrain.py") in each.cmdline()]


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
