"""Launches and compiled variants, by a stub of the CUDA driver: no GPU, nothing is computed.

What a change of the launchers costs, in seconds:

    python kernels/host_cost.py         # variants, launches, torch operators and µs of a call

and the bounds below say how much is allowed. They are what was measured when they were written:
lower them when the numbers fall. The driver is stub_cuda.py and needs a C compiler.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_sigmoid.kernels.flash import tuning

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
WORKER = Path(__file__).with_name("launches_worker.py")
sys.path.append(str(KERNELS))  # scripts beside their modules, and no package
waits = importlib.import_module("waits")

# Kernels that compile in one generation from 256 to 4096 keys, and in training at 64 lengths.
GENERATION_VARIANTS = 3
TRAINING_VARIANTS = 6 if tuning.FENCES_COPIES else 7
# Of one attention layer that decodes one query through transformers' attention interface.
DECODE_LAUNCHES = 2
DECODE_TORCH_OPERATORS = 8


def run(script: Path, *arguments: str, cache: Path):
    """What a script prints as JSON, by the real kernels and not the interpreter's."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def host_cost(tmp_path_factory):
    cache = tmp_path_factory.mktemp("triton")
    return run(KERNELS / "host_cost.py", "--json", "--calls", "20", cache=cache)


# Kernels of each case of launches_worker.py, and how many descriptors sm_90 has for it.
PASSES = ["_forward", "backward_dq", "query_ranges", "backward_dkdv"]
TERMS = ["_forward", "backward_dq", "backward_dbias", "query_ranges", "backward_dkdv"]
MASKED = ["_list_tiles", "_forward"]
DECODE = ["_decode", "_combine"]
LAUNCHED = {
    80: [PASSES, TERMS, DECODE, DECODE],
    90: [PASSES, TERMS, DECODE, ["_forward"], ["_forward"], PASSES],
    100: [PASSES, TERMS, DECODE, DECODE],
    120: [PASSES, TERMS, DECODE, MASKED, DECODE],
}
DESCRIPTORS = {90: [2, 0, 0, 0, 0, 0] if tuning.FENCES_COPIES else [6, 0, 0, 0, 2, 0]}


@pytest.mark.parametrize("arch", LAUNCHED)
def test_every_kernel_launches_at_odd_shapes(arch, tmp_path):
    """The stub refuses what a driver would: grids, threads, shared memory, descriptors, modules."""
    found = run(WORKER, "launch", str(arch), cache=tmp_path)
    assert [[each["kernel"] for each in case["launches"]] for case in found] == LAUNCHED[arch]
    maps = [case["tensor_maps"] for case in found]
    assert maps == DESCRIPTORS.get(arch, [0] * len(found))


def test_the_stub_refuses_what_a_driver_would(tmp_path):
    found = run(WORKER, "refuse", cache=tmp_path)
    taken = [name for name, answer in found.items() if answer == "taken"]
    assert taken == ["descriptor", "grid"]
    assert "no kernel image" in found.pop("module of sm_80")
    assert all("invalid argument" in found[name] for name in found.keys() - set(taken))


def test_what_is_counted_is_what_compiles(tmp_path):
    found = run(WORKER, "compile", cache=tmp_path)
    assert found["counted"] == found["compiled"]
    assert sum(found["counted"].values()) > 2


@pytest.mark.parametrize("function", ["sigmoid", "ssmax"])
def test_lengths_do_not_compile_new_kernels(host_cost, function):
    variants = host_cost["variants"]
    generation, training = variants[f"{function} generate"], variants[f"{function} train"]
    assert {"_forward", "_decode"} <= generation.keys() and set(PASSES) <= training.keys()
    assert sum(generation.values()) <= GENERATION_VARIANTS, generation
    assert sum(training.values()) <= TRAINING_VARIANTS, training


@pytest.mark.parametrize("function", ["sigmoid", "ssmax"])
def test_a_layer_decodes_with_few_launches(host_cost, function):
    costs = host_cost["decode"][function]
    assert 1 <= sum(costs["launches"].values()) <= DECODE_LAUNCHES, costs["launches"]
    assert sum(costs["torch ops"].values()) <= DECODE_TORCH_OPERATORS, costs["torch ops"]
    assert all(0 < us < 1e5 for us in costs["us"].values())


def test_a_missing_compiler_is_named(tmp_path):
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(WORKER.parent)}
    environment.pop("CC", None)
    code = "import stub_cuda, pathlib; stub_cuda.build(pathlib.Path('.'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert "install gcc, or set CC" in done.stderr


LOOP = """
$L1:
  cp.async.wait_group 0;
  bar.sync 0;
  {fence}
  wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{%f1}}, %rd1, %rd2, p, 1, 1, 0, 0;
  wgmma.wait_group.sync.aligned 0;
  cp.async.cg.shared.global [%r1], [%rd3], 16;
  cp.async.commit_group;
  @%p1 bra $L1;
"""


def fenced(fence: str) -> list[str]:
    ((_, lines),) = waits.loops(LOOP.format(fence=fence))
    return waits.events_of(lines)


def test_a_missing_fence_is_found():
    """As Triton 3.6 and 3.7.0 compile a pipelined loop by pointers for sm_90."""
    events = fenced("")
    assert events[:3] == ["wait for copies", "barrier", "product"] and waits.unfenced(events)
    assert not waits.unfenced(fenced("fence.proxy.async.shared::cta;"))
    # By the time that it comes round, the fence lies before the copies.
    ((_, lines),) = waits.loops(
        LOOP.format(fence="").replace("  cp.async.cg", "  fence.proxy.async;\n  cp.async.cg")
    )
    assert waits.unfenced(waits.events_of(lines))


def test_a_register_in_flight_is_found():
    ((_, lines),) = waits.loops(LOOP.format(fence=""))
    assert waits.touched(lines) == []
    late = "  add.f32 %f1, %f1, %f2;\n  wgmma.wait_group"
    ((_, lines),) = waits.loops(LOOP.format(fence="").replace("  wgmma.wait_group", late))
    assert waits.touched(lines)[0] == "add.f32 %f1, %f1, %f2;"


def test_products_are_fenced_from_copies_through_the_other_proxy(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, KERNELS / "waits.py", "--check", "--cases", "sigmoid bf16 64"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("_forward", "backward_dq", "backward_dkdv"):
        assert f"{kernel}, line" in done.stdout
