"""`make gpu` as far as it goes without a GPU: its order, its rows, its compiled kernels."""

import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import gpu_checks
import interpreter
import pytest
import torch

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
sys.path.append(str(KERNELS))  # scripts beside their modules, and no package
gpu = importlib.import_module("gpu")
prewarm = importlib.import_module("prewarm")
sweep = importlib.import_module("sweep")
timing = importlib.import_module("timing")

interpreter.install()

REAL = {**os.environ, "TRITON_INTERPRET": "0"}
# How many kernels compile when one job of each part is launched on the stub driver.
LAUNCH = """
import sys
sys.path.insert(0, {kernels!r})
import prewarm, stub_cuda
stub_cuda.activate(90)
compiled = stub_cuda.count_compilations()
launches = prewarm.launches()
for part in sys.argv[1:]:
    next(iter(launches[part].values()))()
print(len(compiled))
"""


def test_a_dry_run_goes_through_every_part_and_is_resumed(tmp_path):
    command = [sys.executable, KERNELS / "gpu.py", "--dry-run", "--limit", "1"]
    command += ["--out", tmp_path, "--parts", "correctness", "sweep", "benchmark"]
    first = subprocess.run(command, capture_output=True, text=True)
    assert first.returncode == 0, first.stdout + first.stderr
    before = {path.name: path.read_text() for path in tmp_path.glob("*.jsonl")}
    for part in gpu.SECONDS.keys() - {"compile"}:
        (row,) = gpu.latest(tmp_path / f"{part}.jsonl").values()
        # No time of a dry run is left for someone to take for a GPU's.
        assert row["status"] == "dry" and row.keys() <= {"key", "status", "reason", "seconds"}
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 0, second.stdout + second.stderr
    before.pop("machine.jsonl")
    assert before == {name: (tmp_path / name).read_text() for name in before}


def test_a_cache_made_without_a_gpu_is_found_in_another_folder(tmp_path):
    made, moved = tmp_path / "made", tmp_path / "moved"
    command = [sys.executable, KERNELS / "prewarm.py", made, "--limit", "1", "--processes", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "3 jobs" in done.stdout and "0 of them refused" in done.stdout, done.stdout + done.stderr
    shutil.move(made, moved)

    def compilations(*parts: str) -> int:
        run = subprocess.run(
            [sys.executable, "-c", LAUNCH.format(kernels=str(KERNELS)), *parts],
            capture_output=True, text=True, env={**REAL, "TRITON_CACHE_DIR": str(used)},
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        return int(run.stdout)

    used = tmp_path / "as_it_was_moved"
    shutil.copytree(moved, used)
    assert compilations("benchmark") > 0  # Triton wrote where the kernels lay
    used = moved
    assert prewarm.relocate(moved) > 5
    assert compilations(*prewarm.PARTS) == 0


def test_every_pair_of_features_is_checked_first():
    factors = tuple(tuple(each) for each in gpu_checks.FACTORS)
    rows = list(gpu_checks.pairwise(factors))
    assert rows == list(gpu_checks.pairwise(factors)) and len(rows) < 60
    for i, j in itertools.combinations(range(len(factors)), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(factors[i], factors[j]))
    names = list(gpu_checks.ordered())
    assert names[: len(rows)] == [" ".join(("exact", *row)) for row in rows]
    assert len(names) == len(set(names)) > 5000


def test_checks_of_a_gpu_need_neither_pytest_nor_hypothesis():
    code = "import sys; sys.modules.update(hypothesis=None, pytest=None); import gpu_checks"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_check_passes_and_fails_in_the_interpreter(monkeypatch):
    check = gpu_checks.ordered()["small_weights fp32 n=2^11"]
    check(device="cpu")
    right = gpu_checks.functional.sigmoid_attention
    monkeypatch.setattr(
        gpu_checks.functional, "sigmoid_attention", lambda *a, **k: right(*a, **k) * 1.0001
    )
    with pytest.raises(AssertionError):
        check(device="cpu")


def test_checks_of_other_kinds_pass_in_the_interpreter():
    for function in gpu_checks.FUNCTIONS:
        gpu_checks.statistics(function, torch.float32, "intervals", 20, 33, gpu_checks.EVERY, "cpu")
        gpu_checks.repeats(function, torch.float32, 20, 33, gpu_checks.EVERY, "cpu")
        gpu_checks.graph(function, 20, 33, True, "intervals", "cpu")


def test_rows_say_what_was_right_wrong_and_not_reached(tmp_path, monkeypatch):
    path, calls = tmp_path / "rows.jsonl", []

    def wrong(device):
        raise AssertionError("dq: error 2, budget 1")

    jobs = {"right": lambda device: calls.append(device), "wrong": wrong}
    later = time.time() + 60
    assert gpu.do(jobs, path, "cpu", later, dry=False) == 0
    assert gpu.do(jobs, path, "cpu", later, dry=False) == 0  # nothing is repeated
    assert calls == ["cpu"]
    rows = gpu.latest(path)
    assert [rows[name]["status"] for name in jobs] == ["ok", "failed"]
    assert rows["wrong"]["reason"] == "AssertionError: dq: error 2, budget 1"
    # Out of time: no row.
    assert gpu.do({"late": wrong}, path, "cpu", time.time() - 1, dry=False) == 0
    assert "late" not in gpu.latest(path)
    # A GPU that answers no more: another process goes on.
    monkeypatch.setattr(gpu, "usable", lambda device: False)
    assert gpu.do({"lost": wrong}, path, "cpu", later, dry=False) == gpu.LOST


def test_a_job_that_kills_its_process_is_a_failure_and_is_not_repeated(tmp_path):
    path = tmp_path / "rows.jsonl"
    code = f"""
import sys; sys.path.insert(0, {str(KERNELS)!r})
import gpu, os, pathlib
gpu.do({{"crash": lambda device: os._exit(9)}}, pathlib.Path({str(path)!r}), "cpu", 1e12, dry=False)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    with path.open("a") as file:
        file.write('{"key": "cut sho')  # as a kill leaves it
    gpu.close(path)
    assert gpu.latest(path)["crash"]["reason"] == gpu.DIED


def test_rows_of_another_commit_are_not_gone_on_with(tmp_path):
    path = tmp_path / "machine.jsonl"
    assert gpu.differs(path, {"commit": "a"}) is None
    gpu.append(path, {"commit": "a", "torch": "2.11", "clocks_mhz": "unknown"})
    assert gpu.differs(path, {"commit": "a", "torch": "2.11", "clocks_mhz": {"sm": 1980}}) is None
    assert gpu.differs(path, {"commit": "b", "torch": "2.11"}) == "commit (a, now b)"


def test_failures_come_first_and_decide_the_exit(tmp_path, capsys):
    class options:
        out, limit, dry_run = tmp_path, 2, False

    assert gpu.summarize(options) == 1  # no check ran
    gpu.append(tmp_path / "correctness.jsonl", {"key": "a", "status": "ok"})
    assert gpu.summarize(options) == 0
    gpu.append(tmp_path / "correctness.jsonl", {"key": "b", "status": "failed", "reason": "dk"})
    capsys.readouterr()
    assert gpu.summarize(options) == 1
    shown = capsys.readouterr().out
    assert shown.index("FAILED b: dk") < shown.index("=== sweep")


def test_what_cannot_be_captured_is_queued_and_says_so(monkeypatch):
    class Graph:
        def __init__(self, *args, **kwargs):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *error):
            pass

        def replay(self):
            pass

    for name in ("CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, Graph)
    for name in ("synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    device = torch.device("cuda")
    assert timing.capture(lambda: None, device)[1] == timing.GRAPH

    def refuses():
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    step, how = timing.capture(refuses, device)
    assert step is refuses and how.endswith("operation not permitted when stream is capturing")


SMALL = (1, 2, 1, 33, 33, 16)


def test_a_candidate_is_compared_with_the_table_and_timed():
    tile = sweep.candidates("forward", "sigmoid", 16)[1]
    row = sweep.run("forward", "sigmoid", SMALL, tile, "cpu")
    assert row["ms"] > 0 and row["table_ms"] > 0 and row["tile"] == tile._asdict()
    assert json.loads(json.dumps(row))["timed"] == "host clock"
    assert "forward sigmoid 1x2x1x33x33x16" in sweep.summary([row])


def test_a_candidate_that_is_wrong_or_not_taken_is_not_timed(monkeypatch):
    tile = sweep.candidates("dq", "ssmax", 16)[0]
    results = iter([torch.ones(2), torch.ones(2) * 1.1])

    def step():
        sweep.tuning.tile("dq", "ssmax", torch.bfloat16, 16)
        return {"dq": next(results)}

    monkeypatch.setattr(sweep, "prepare", lambda *args: step)
    with pytest.raises(ArithmeticError, match="wrong dq"):
        sweep.run("dq", "ssmax", SMALL, tile, "cpu")
    monkeypatch.setattr(sweep, "prepare", lambda *args: lambda: {"dq": torch.ones(2)})
    with pytest.raises(RuntimeError, match="took no tile"):
        sweep.run("dq", "ssmax", SMALL, tile, "cpu")
