"""The Triton kernels on a CUDA device, at the sizes and with the tiles that users get.

    TRITON_INTERPRET=0 python -m pytest -m gpu

The whole suite otherwise runs without a GPU, and these are left out of it.
"""

import math

import oracles
import pytest
import torch

from hf_sigmoid import functional

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
TERMS = {"softcap", "alibi_slopes", "logit_bias", "sinks"}
FUNCTIONS = pytest.mark.parametrize("function", ["sigmoid", "ssmax"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
EVERY_TERM = pytest.mark.parametrize("terms", [set(), TERMS], ids=["plain", "every_term"])


def make(
    function, dtype, M, N, mask="none", terms=frozenset(), B=1, G=2, R=2, dims=(64, 64), seed=0
):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    return oracles.make(function, dtype, B, G, R, M, N, *dims, mask, terms, "full", generator)


def on_device(problem):
    """The keyword arguments of the problem's verb, in its dtype."""
    tensors = {
        name: t.to(problem.dtype if name in ("query", "key", "value") else torch.float32)
        for name, t in problem.tensors.items()
    }
    given = {**tensors, **problem.options, "backend": "triton"}
    return {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }


def verb(function):
    return getattr(functional, f"{function}_attention")


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
def test_descriptors_read_what_pointers_read(monkeypatch, dtype, dims, layout):
    """On GPUs whose table asks for descriptors; elsewhere both calls take the pointers."""
    from hf_sigmoid.kernels.flash import forward

    problem = make("sigmoid", dtype, 700, 1024, "causal", B=2, G=3, dims=dims)
    given = on_device(problem)
    for name in ("key", "value"):
        tensor = given[name]
        if layout == "heads last":
            tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "part of a cache":
            tensor = torch.nn.functional.pad(tensor, (0, 0, 5, 9), value=float("nan"))[:, :, 5:-9]
        given[name] = tensor
    described = verb("sigmoid")(**given)
    monkeypatch.setattr(forward, "is_describable", lambda tensor: False)
    torch.testing.assert_close(described, verb("sigmoid")(**given), rtol=2**-7, atol=1e-6)


@EVERY_TERM
@pytest.mark.parametrize(("M", "N"), [(300, 333), (3, 4099)], ids=["prefill", "decode"])
@pytest.mark.parametrize("mask", oracles.MASKS)
@DTYPES
@FUNCTIONS
def test_statistics_are_right_and_change_no_bit(function, dtype, mask, M, N, terms):
    given = on_device(make(function, dtype, M, N, mask, terms))
    plain = verb(function)(**given)
    output, statistics = verb(function)(**given, return_statistics=True)
    assert torch.equal(output, plain)
    # In float64, of the inputs as rounded to the dtype.
    exact = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in given.items()
    }  # fmt: skip
    _, expected = verb(function)(**{**exact, "backend": "torch"}, return_statistics=True)
    # Products of the inputs are summed in float32; sums of weights by the form of σ.
    size = expected.max_logit[expected.max_logit.isfinite()].abs().max().item()
    eps = torch.finfo(torch.float32).eps
    tolerance = {"rtol": 64 * eps * (1 + size) + 2.0**-12, "atol": 64 * eps * (1 + size)}
    torch.testing.assert_close(statistics.max_logit.double(), expected.max_logit, **tolerance)
    torch.testing.assert_close(statistics.weight_sum.double(), expected.weight_sum, **tolerance)


@EVERY_TERM
@pytest.mark.parametrize(("M", "N"), [(1111, 1111), (3, 4099)], ids=["prefill", "decode"])
@HALVES
@FUNCTIONS
def test_two_runs_give_the_same_bits(function, dtype, M, N, terms):
    problem = make(function, dtype, M, N, "causal", terms)
    given = on_device(problem)
    names = list(problem.tensors)
    results = []
    for _ in range(2):
        leaves = [given[name].detach().requires_grad_() for name in names]
        call = {**given, **dict(zip(names, leaves, strict=True)), "return_statistics": True}
        output, statistics = verb(function)(**call)
        gradients = torch.autograd.grad(output.float().square().sum(), leaves)
        results.append((output, *statistics, *gradients))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


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
    """Replayed on other tensors, intervals included, the graph equals a call on them."""
    first, second = (make(function, torch.bfloat16, M, N, mask, seed=seed) for seed in (0, 1))
    names = list(first.tensors)
    inputs = on_device(first)
    leaves = [inputs[name].requires_grad_(differentiates) for name in names]

    def call():
        output, statistics = verb(function)(**inputs, return_statistics=True)
        gradients = ()
        if differentiates:
            gradients = torch.autograd.grad(output.float().square().sum(), leaves)
        return output.detach(), *statistics, *gradients

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for source in (second, first):
        with torch.no_grad():
            for name, value in on_device(source).items():
                if isinstance(value, torch.Tensor):
                    inputs[name].copy_(value)
        graph.replay()
        for replayed, expected in zip(captured, call(), strict=True):
            assert torch.equal(replayed, expected)


def relative_error_of_weights(dtype, n, M=64, keys=64):
    """Largest relative error of σ(z − log n), read through values that are a unit matrix."""
    generator = torch.Generator().manual_seed(2)
    q, k = (
        torch.randn(1, 1, length, 64, generator=generator).to(dtype).to(DEVICE)
        for length in (M, keys)
    )
    v = torch.eye(keys, device=DEVICE, dtype=dtype)[None, None]
    weights = functional.sigmoid_attention(q, k, v, bias=-math.log(n), backend="triton")
    z = q.double() @ k.double().mT * 64**-0.5
    exact = torch.sigmoid(z - math.log(n))
    return ((weights.double() - exact).abs() / exact).max().item()


@pytest.mark.parametrize("log2_n", range(0, 18))
@DTYPES
def test_small_weights_keep_their_relative_accuracy(dtype, log2_n):
    """What a form of σ with an absolute error, like tanh.approx, loses at long contexts."""
    eps = torch.finfo(dtype).eps
    # Weights are rounded before they meet the values, and the output after. float16 keeps them
    # to 2^-25, as subnormal numbers below 2^-14.
    smallest = 2.0**-log2_n * math.exp(-6)
    subnormal = 2.0**-24 / smallest if dtype == torch.float16 else 0.0
    # Halley's cubic step leaves 2^-12.8; other forms round an argument near −60: 2^-19.
    form = 2.0**-12 if dtype != torch.float32 else 64 * eps
    assert relative_error_of_weights(dtype, 2**log2_n) <= eps + subnormal + form


@HALVES
def test_what_tanh_costs_is_reported(monkeypatch, record_property, dtype):
    """No claim: PTX bounds its absolute error only. `pytest -m gpu -rP` prints the numbers."""
    for form in ("accurate", "tanh"):
        monkeypatch.setenv("HF_SIGMOID_FORM", form)
        for log2_n in range(0, 18):
            error = relative_error_of_weights(dtype, 2**log2_n)
            record_property(f"{form}_{2**log2_n}", error)
            print(f"{form:8} {dtype} n {2**log2_n:6} relative error {error:.2e}")
