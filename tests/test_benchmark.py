"""kernels/benchmark.py: its rows, its verdicts, and that it times nothing wrong."""

import importlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

from hf_sigmoid import functional

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
SCRIPT = KERNELS / "benchmark.py"
sys.path.append(str(KERNELS))  # the benchmark is a script beside its modules, and no package
benchmark = importlib.import_module("benchmark")
benchmark_report = importlib.import_module("benchmark_report")
TINY = ["--device", "cpu", "--lengths", "64", "--decode", "96", "--dims", "16", "--heads", "4"]
TINY += ["--key-heads", "2", "--rounds", "2"]
GPU = "NVIDIA X"


def row(name, ms, device=GPU, **changes):
    shape = {"dtype": "bf16", "B": 1, "H": 16, "G": 16, "M": 4096, "N": 4096, "D": 64}
    return {"name": name, "device": device, "ms": ms, **shape, "is_causal": True,
            "pass": "forward", **changes}  # fmt: skip


def verdicts(rows):
    return {text: status for text, status, _ in benchmark_report.judge(rows)}


def test_help_says_what_is_measured():
    run = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "TFLOP/s" in run.stdout and "--plot" in run.stdout


def test_a_tiny_run_writes_rows_and_is_resumed(tmp_path, capsys):
    out, picture = tmp_path / "rows.jsonl", tmp_path / "rows.png"
    contenders = ["--contenders", "sigmoid", "ssmax", "flash-attn-2", "copy"]
    arguments = [*TINY, *contenders, "--out", str(out), "--plot", str(picture)]
    rows = benchmark.main(arguments)
    assert rows == [json.loads(line) for line in out.read_text().splitlines()]
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
    timed = [r for r in rows if "ms" in r]
    assert {r["name"] for r in timed} == {"sigmoid", "ssmax", "sdpa", "copy"}
    assert all(r["ms"] >= r["ms_best"] > 0 and r["of_sdpa"] > 0 for r in timed)
    # A GPU's rows say how they were timed, and at what clocks.
    assert all((r["timed"], r["clocks_mhz"]) == ("host clock", None) for r in timed)
    assert {r["versions"]["torch"] for r in timed} == {importlib.metadata.version("torch")}
    missing = [r for r in rows if r["name"] == "flash-attn-2"]
    assert len(missing) == 3 and all("ModuleNotFoundError" in r["reason"] for r in missing)
    shown = capsys.readouterr().out
    assert "B1 H4 G2 M1 N96 D16 full" in shown and "ModuleNotFoundError" in shown
    assert "CPU forward ≤ 0.9 × sdpa" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    before = out.read_bytes()
    benchmark.main(arguments)
    assert out.read_bytes() == before


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    right = functional.sigmoid_attention

    def wrong(q, k, v, **options):
        return right(q, k, v, **options) * 1.001

    monkeypatch.setattr(functional, "sigmoid_attention", wrong)
    rows = benchmark.main([*TINY, "--passes", "forward", "--contenders", "sigmoid"])
    for r in (r for r in rows if r["name"] == "sigmoid"):
        assert "ms" not in r and "wrong output, not timed" in r["reason"]


def test_operations_follow_the_rule():
    shape = row("sigmoid", 1.0, is_causal=False)
    full = 4 * 16 * 4096 * 4096 * 64
    assert benchmark.operations(shape) == full
    assert benchmark.operations({**shape, "is_causal": True}) == full / 2
    assert benchmark.operations({**shape, "pass": "backward"}) == 2.5 * full


def test_the_worst_shape_decides_a_target():
    text = "forward ≥ 1.15 × own softmax, D 64"
    rows = [row("sigmoid", 1.0), row("softmax", 1.2)]
    assert verdicts(rows)[text] == "met"
    rows += [row("sigmoid", 1.0, N=8192, M=8192), row("softmax", 1.1, N=8192, M=8192)]
    assert verdicts(rows)[text] == "not met"


def test_the_fastest_softmax_is_the_one_to_beat():
    text = "forward ≥ 0.95 × best softmax, D 128"
    rows = [row(name, ms, D=128) for name, ms in (("sigmoid", 1.0), ("sdpa", 1.5))]
    assert verdicts(rows)[text] == "met"
    assert verdicts([*rows, row("flash-attn-3", 0.9, D=128)])[text] == "not met"


def test_causal_is_compared_with_full():
    rows = [row("sigmoid", 1.0, is_causal=False), row("sigmoid", 0.55)]
    assert verdicts(rows)["causal ≤ 0.6 × full"] == "met"
    rows[1]["ms"] = 0.7
    assert verdicts(rows)["causal ≤ 0.6 × full"] == "not met"


def test_what_is_missing_is_not_measured():
    failed = row("softmax", 0.0, reason="OutOfMemoryError")
    del failed["ms"]
    # A CPU's rows say nothing about a GPU's targets.
    rows = [row("sigmoid", 1.0), failed]
    rows += [row(name, 1.0, device="x86_64 CPU 2 threads") for name in ("sigmoid", "softmax")]
    assert set(verdicts(rows).values()) == {"not measured"}
