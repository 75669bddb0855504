"""The Triton kernels on a CUDA device, at the sizes and with the tiles that users get.

    TRITON_INTERPRET=0 python -m pytest -m gpu

The whole suite otherwise runs without a GPU, and these are left out of it. The checks themselves
are in gpu_checks.py; `make gpu` runs a choice of them.
"""

import gpu_checks
import oracles
import pytest
import torch
from gpu_checks import FUNCTIONS as FUNCTION_NAMES
from gpu_checks import make

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
TERMS = set(gpu_checks.EVERY)
FUNCTIONS = pytest.mark.parametrize("function", FUNCTION_NAMES)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
EVERY_TERM = pytest.mark.parametrize("terms", [set(), TERMS], ids=["plain", "every_term"])


@EVERY_TERM
@pytest.mark.parametrize("mask", oracles.MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 40), (256, 256)], ids=str)
@DTYPES
@FUNCTIONS
def test_kernels_are_as_exact_as_plain_pytorch(function, dtype, dims, mask, terms):
    # Neither length is a multiple of a tile; grouped heads; more keys than queries.
    problem = make(function, dtype, 300, 333, mask, terms, B=2, dims=dims)
    oracles.check(problem, "triton", device=DEVICE)


@EVERY_TERM
@pytest.mark.parametrize("mask", ["none", "intervals", "dense_causal"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize(("M", "R"), [(1, 1), (1, 8), (7, 4), (64, 2)], ids=str)
@DTYPES
@FUNCTIONS
def test_decode_is_as_exact_as_plain_pytorch(function, dtype, M, R, dims, mask, terms):
    problem = make(function, dtype, M, 4099, mask, terms, R=R, dims=dims)
    oracles.check(problem, "triton", device=DEVICE)


@pytest.mark.parametrize(("mask", "M", "N"), [
    ("none", 1024, 1536),  # every tile is full: the loop that delays products
    ("causal", 1111, 1111),
    ("causal", 1025, 2047),
    ("causal", 1500, 1001),  # the first rows see nothing
    ("window", 1279, 1279),
])  # fmt: skip
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@DTYPES
@FUNCTIONS
def test_long_loops_are_as_exact_as_plain_pytorch(function, dtype, dims, mask, M, N):
    problem = make(function, dtype, M, N, mask, G=1, dims=dims)
    oracles.check(problem, "triton", device=DEVICE)


@pytest.mark.parametrize("layout", ["heads first", "heads last", "part of a cache"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (72, 128)], ids=str)
@DTYPES
def test_descriptors_read_what_pointers_read(dtype, dims, layout):
    gpu_checks.descriptors(dtype, dims, layout, DEVICE)


@EVERY_TERM
@pytest.mark.parametrize(("M", "N"), [(300, 333), (3, 4099)], ids=["prefill", "decode"])
@pytest.mark.parametrize("mask", oracles.MASKS)
@DTYPES
@FUNCTIONS
def test_statistics_are_right_and_change_no_bit(function, dtype, mask, M, N, terms):
    gpu_checks.statistics(function, dtype, mask, M, N, terms, DEVICE)


@EVERY_TERM
@pytest.mark.parametrize(("M", "N"), [(1111, 1111), (3, 4099)], ids=["prefill", "decode"])
@HALVES
@FUNCTIONS
def test_two_runs_give_the_same_bits(function, dtype, M, N, terms):
    gpu_checks.repeats(function, dtype, M, N, terms, DEVICE)


@pytest.mark.parametrize("mask", ["causal", "intervals"])
@pytest.mark.parametrize(
    ("M", "N", "differentiates"),
    [
        pytest.param(300, 333, False, id="prefill"),
        pytest.param(1, 4099, False, id="decode"),
        pytest.param(300, 333, True, id="prefill_and_backward"),
    ],
)
@FUNCTIONS
def test_a_captured_graph_follows_its_inputs(function, M, N, differentiates, mask):
    gpu_checks.graph(function, M, N, differentiates, mask, DEVICE)


@pytest.mark.parametrize("log2_n", range(0, 18))
@DTYPES
def test_small_weights_keep_their_relative_accuracy(dtype, log2_n):
    gpu_checks.small_weights(dtype, log2_n, DEVICE)


@HALVES
def test_what_tanh_costs_is_reported(monkeypatch, record_property, dtype):
    """No claim: PTX bounds its absolute error only. `pytest -m gpu -rP` prints the numbers."""
    for form in ("accurate", "tanh"):
        monkeypatch.setenv("HF_SIGMOID_FORM", form)
        for log2_n in range(0, 18):
            error = gpu_checks.relative_error_of_weights(dtype, 2**log2_n, DEVICE)
            record_property(f"{form}_{2**log2_n}", error)
            print(f"{form:8} {dtype} n {2**log2_n:6} relative error {error:.2e}")


@pytest.mark.parametrize("every_term", [False, True])
@FUNCTIONS
def test_dropout_is_one_mask_in_every_pass(function, every_term):
    gpu_checks.dropout(function, every_term, DEVICE)
