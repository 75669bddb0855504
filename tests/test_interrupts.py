"""Ctrl-C in the recipes: the first saves and says how to go on, a second ends them at once."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from safetensors.torch import load_file
from training_runs import (
    ON_CPU,
    RECIPES,
    WAIT,
    arguments,
    launcher,
    losses,
    signal_after,
    started,
    steps,
    until,
    workers_of,
)  # fmt: skip

from hf_sigmoid.training import checkpointing  # isort: skip
import stages  # isort: skip
from hf_sigmoid.training import train  # isort: skip
from hf_sigmoid.training import finished_model  # isort: skip

EARLY = {"checkpoint.every": 0}


def interrupt(times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def _ctrl_c():
    """Tests may run in the background of a shell, where SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_ends_it_at_once(tiny, corpus_file, tmp_path, monkeypatch):
    argv = arguments(tiny, corpus_file, tmp_path, **EARLY)
    signal_after(monkeypatch, 3, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as error:
        train.main(argv)
    assert not error.value.args  # nothing was saved, and nothing else is said
    assert len(losses(tmp_path)) == 3 and not (tmp_path / "checkpoints").exists()


def test_a_second_while_it_saves_leaves_complete_checkpoints_alone(
    tiny, corpus_file, tmp_path, monkeypatch
):
    sync = checkpointing.sync_tree

    def sync_and_interrupt(folder):
        sync(folder)
        if folder.name == "step_00000006.tmp":
            interrupt(2)

    monkeypatch.setattr(checkpointing, "sync_tree", sync_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        train.main(arguments(tiny, corpus_file, tmp_path))
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step_00000003"]


def test_one_while_the_final_model_is_written_loses_nothing(
    tiny, corpus_file, tmp_path, monkeypatch
):
    fill = finished_model.write

    def interrupt_and_fill(*given):
        interrupt()
        fill(*given)

    monkeypatch.setattr(finished_model, "write", interrupt_and_fill)
    argv = arguments(tiny, corpus_file, tmp_path, **EARLY, **{"train.steps": 2})
    assert train.main(argv) == tmp_path / "final"
    assert load_file(tmp_path / "final" / "model.safetensors")


def test_a_shell_that_started_a_run_without_ctrl_c_keeps_it_so(
    tiny, corpus_file, tmp_path, monkeypatch
):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_after(monkeypatch, 1, signal.SIGINT, signal.SIGINT)
    keys = {"train.steps": 2, **EARLY}
    assert train.main(arguments(tiny, corpus_file, tmp_path, **keys))


def ended(run: subprocess.Popen) -> str:
    """What was said on stderr by a run that ended as an interrupted one should."""
    _, said = run.communicate(timeout=WAIT)
    assert run.returncode == 130, said
    assert "Traceback" not in said
    return said


# Interrupts itself when a module is imported, or a function called.
MOMENTS = """
import builtins, json, os, runpy, signal, sys
script, moment, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = script
sys.path.insert(0, os.path.dirname(script))
def now(*given, **options):
    os.kill(os.getpid(), signal.SIGINT)
    import time
    time.sleep(60)
if "." in moment:
    import importlib
    module, name = moment.rsplit(".", 1)
    setattr(importlib.import_module("hf_sigmoid.training." + module), name, now)
else:
    found = builtins.__import__
    def importing(name, *rest, **options):
        return now() if name == moment else found(name, *rest, **options)
    builtins.__import__ = importing
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("script", "moment"),
    [
        ("continue_pretrain.py", "torch"),
        ("continue_pretrain.py", "prepare.load_model"),
        ("continue_pretrain.py --dry-run", "dry_run.one_step"),
        ("distil_attention.py", "corpus.open_corpus"),
        ("heal_smollm2.py", "torch"),
        ("demo.py", "torch"),
        ("stability.py --jobs 1", "numpy"),
        ("overhead.py --model TINY", "prepare.load_model"),
        ("needle.py --models TINY --lengths 64", "torch"),
    ],
)
def test_before_the_first_step_it_is_one_line_and_nothing_is_written(
    tiny, corpus_file, tmp_path, script, moment
):
    file, *more = script.replace("TINY", tiny).split()
    if file in ("continue_pretrain.py", "distil_attention.py"):
        more += [f"model={tiny}", f"data.path={corpus_file}", f"output_dir={tmp_path / 'out'}"]
    elif file != "demo.py":
        more += ["--out", str(tmp_path / "out")]
    said = ended(started("-c", MOMENTS, str(RECIPES / file), moment, *more))
    (line,) = [each for each in said.splitlines() if each.startswith(("interrupted", "stopped"))]
    assert line.partition(": ")[2].startswith("the same command goes on from")
    left = [
        path for path in (tmp_path / "out").rglob("*") if path.is_file() and path.stat().st_size
    ]
    assert not left


@pytest.mark.parametrize("processes", [1, 2])
def test_under_a_launcher_the_terminals_ctrl_c_saves_one_step_of_all(
    tiny, corpus_file, tmp_path, processes
):
    keys = {"train.steps": 10**6, "optim.lr": 1e-5, **EARLY}
    run = started(*launcher(processes), *arguments(tiny, corpus_file, tmp_path, **keys), **ON_CPU)
    until(lambda: steps(tmp_path) > 3, run)
    workers = workers_of(run)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    _, said = run.communicate(timeout=WAIT)
    psutil.wait_procs(workers, timeout=WAIT)
    saved = checkpointing.latest(tmp_path / "checkpoints")
    assert f"interrupted; step {saved.step} is saved: the same command goes on" in said
    assert saved.step == steps(tmp_path)


def test_a_script_hands_it_on_to_its_step_and_waits(tmp_path):
    step = (
        "import pathlib, sys, time; from hf_sigmoid.training import script\n"
        "def main():\n"
        "    pathlib.Path('begun').touch()\n"
        "    try: time.sleep(60)\n"
        "    except KeyboardInterrupt: time.sleep(1); pathlib.Path('saved').touch(); raise\n"
        "script.run(main)\n"
    )
    outer = f"import stages; stages.run(['python', '-c', {step!r}])"
    code = f"from hf_sigmoid.training import script; script.run(lambda: exec({outer!r}))"
    run = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(RECIPES)}, start_new_session=True,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until((tmp_path / "begun").exists, run)
    os.killpg(run.pid, signal.SIGINT)
    assert "goes on from what is kept" in ended(run)
    assert (tmp_path / "saved").exists()


def test_a_step_that_fails_is_one_line():
    with pytest.raises(subprocess.CalledProcessError):
        stages.run(["python", "-c", "raise SystemExit(3)"])
    code = (
        "import stages; from hf_sigmoid.training import script; "
        "script.run(lambda: stages.run(['python', '-c', 'exit(3)']))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(RECIPES)},
    )  # fmt: skip
    assert run.returncode == 1
    assert run.stderr == "error: python -c 'exit(3)' ended with status 3\n"


def test_a_sweep_keeps_its_runs_and_ends_its_processes(tmp_path):
    command = ["--steps", "40", "--jobs", "2", "--out", str(tmp_path)]
    run = started(str(RECIPES / "stability.py"), *command)
    file = tmp_path / "stability.jsonl"
    until(lambda: file.exists() and file.read_text().count("\n") > 1, run)
    jobs = psutil.Process(run.pid).children(recursive=True)
    os.killpg(run.pid, signal.SIGINT)
    said = ended(run)
    assert said.count("interrupted: ") == 1
    _, alive = psutil.wait_procs(jobs, timeout=10)
    assert not alive
    assert all(json.loads(line) for line in file.read_text().splitlines())


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("stability.py", "--jobs 0", "--steps, --seeds and --jobs: expected at least 1"),
        ("stability.py", "--attn sigmoyd --out OUT", "--attn sigmoyd: "),
        ("stability.py", "--out FILE", "is a file, expected a folder"),
        ("overhead.py", "--steps 1", "--steps: expected at least 2"),
        ("overhead.py", "--out .", "--out: expected a file to write, got the folder"),
        ("overhead.py", "--model absent/model --out OUT", "absent/model"),
        ("heal_smollm2.py", "--out FILE", "is a file, expected a folder"),
    ],
)
def test_options_that_cannot_be_used_are_one_line(tmp_path, script, options, words):
    (tmp_path / "file").touch()
    places = {"OUT": str(tmp_path / "out"), "FILE": str(tmp_path / "file")}
    argv = [places.get(word, word) for word in options.split()]
    run = started(str(RECIPES / script), *argv)
    _, said = run.communicate(timeout=WAIT)
    assert run.returncode == 2 and "Traceback" not in said, said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert words in line and not (tmp_path / "out").exists()
