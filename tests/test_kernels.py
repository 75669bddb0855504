"""The Triton kernels, in Triton's interpreter, against the reference in float64."""

import itertools
import math
import warnings
from types import SimpleNamespace

import gpu_checks
import interpreter
import oracles
import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from triton.runtime.interpreter import InterpreterBuilder

from hf_sigmoid import functional, reference
from hf_sigmoid.kernels import flash
from hf_sigmoid.kernels.flash import tiles as tile_helpers
from hf_sigmoid.kernels.flash import tuning

interpreter.install()
TERMS = {"softcap", "alibi_slopes", "logit_bias", "sinks"}
FUNCTIONS = pytest.mark.parametrize("function", ["sigmoid", "ssmax"])


SIZES = {"forward": (16, 32), "dq": (32, 16), "dkdv": (16, 16), "decode": (16, 16)}


def tiles(sizes=SIZES, delay=True, packed=False, descriptors=False, wait=False):
    """What stands in for `tuning.tile`: several tiles in each direction at these tests' sizes."""

    def tile(kernel, function, dtype, dim, described=False, terms=False):
        options = (delay, packed and dtype.itemsize == 2, delay and descriptors and described)
        options += (wait and dtype.itemsize == 2,)
        return tuning.Tile(*sizes[kernel], 4, 1, 1, *options)

    return tile


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(tuning, "tile", tiles())
    monkeypatch.setattr(tuning, "LEAST_KEYS_TO_SPLIT", 24)


def call(function, q, k, v, row, intervals, *terms, softcap=0.0, statistics=False):
    terms = (*terms, None, None, None, None)[:4]  # mask, logit_bias, alibi_slopes, sinks
    scaling = q.shape[-1] ** -0.5
    options = (function, scaling, softcap, 0.0, 0, statistics)
    return flash.attention(q, k, v, row, intervals, *terms, *options)


def small(B=1, H=2, G=1, M=20, N=37, D=8, V=12, dtype=torch.float32):
    """q, k, v, row and causal intervals."""
    q, k, v = torch.randn(B, H, M, D), torch.randn(B, G, N, D), torch.randn(B, G, N, V)
    hi = (torch.arange(M) + 1 + N - M).clamp(0, N)
    intervals = torch.stack([0 * hi, hi], -1).int().expand(B, M, 2)
    row = torch.randn(B, H, M, dtype=torch.promote_types(dtype, torch.float32))
    return *(t.to(dtype) for t in (q, k, v)), row, intervals


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@settings(settings.get_profile("kernels"))
@given(
    oracles.problems(dtypes=DTYPES, longest=50, few_queries=True),
    st.sampled_from([(16, 32), (32, 16), (32, 32)]),
    st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    st.booleans(),
)
def test_output_and_gradients_are_as_exact_as_plain_pytorch(problem, size, options, wide):
    """Few queries take the decode kernel; `--cases N` draws N problems."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "tile", tiles(dict.fromkeys(SIZES, size), *options))
        if wide:  # as with a tensor whose tiles pass 2^31 elements
            patch.setattr(tile_helpers, "WIDE_OFFSETS", 1)
        oracles.check(problem, "triton")


@FUNCTIONS
@pytest.mark.parametrize(
    ("sizes", "mask"),
    [
        pytest.param((1, 2, 2, 1, 70, 16, 16), "causal", id="one_query"),
        pytest.param((1, 1, 3, 70, 1, 16, 16), "none", id="one_key"),
        pytest.param((1, 1, 1, 70, 70, 16, 16), "causal", id="full_tiles_and_diagonal"),
        pytest.param((1, 1, 1, 64, 64, 16, 16), "none", id="only_full_tiles"),
        pytest.param((1, 1, 1, 60, 40, 16, 16), "causal", id="first_rows_see_nothing"),
        pytest.param((1, 1, 1, 20, 20, 1, 130), "none", id="one_and_130_dims"),
        pytest.param((2, 1, 2, 40, 50, 12, 20), "intervals", id="intervals_that_do_not_rise"),
    ],
)
def test_shapes_with_a_reason(function, sizes, mask):
    generator = torch.Generator().manual_seed(1)
    problem = oracles.make(function, torch.float32, *sizes, mask, set(), "full", generator)
    oracles.check(problem, "triton")


@FUNCTIONS
def test_every_term_at_once_in_bfloat16(function):
    generator = torch.Generator().manual_seed(2)
    problem = oracles.make(
        function, torch.bfloat16, 2, 2, 2, 33, 49, 20, 33, "dense_causal", TERMS, "full", generator
    )
    oracles.check(problem, "triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["none", "dense"])
def test_ssmax_in_16_bits_does_not_round_its_logits(dtype, mask):
    for problem in oracles.sharp(dtype, mask):
        oracles.check(problem, "triton")


@FUNCTIONS
@pytest.mark.parametrize("multiplier", [-1.5, 0.0])
def test_row_numbers_of_either_sign(function, multiplier):
    name = "bias" if function == "sigmoid" else "multiplier"
    for extras in (set(), TERMS):
        generator = torch.Generator().manual_seed(3)
        problem = oracles.make(
            function, torch.float32, 1, 1, 2, 20, 40, 8, 8, "causal", extras, "full", generator
        )
        problem.tensors[name] = problem.tensors[name] * 0 + multiplier
        oracles.check(problem, "triton")


@pytest.mark.skipif(
    Version(triton.__version__) < Version("3.8"), reason="its interpreter has no float64 dot"
)
@FUNCTIONS
@pytest.mark.parametrize("every_term", [False, True])
def test_gradients_are_derivatives_of_the_output(function, every_term):
    """torch's gradcheck of the kernels themselves, in float64."""
    q, k, v, row, intervals = small(M=3, N=18, D=2, V=3, dtype=torch.float64)
    bias = slopes = sinks = None
    if every_term:
        bias, slopes = torch.randn(1, 2, 3, 18).double(), torch.rand(1, 2).double()
        sinks = torch.randn(2).double() if function == "ssmax" else None
    inputs = [t if t is None else t.requires_grad_() for t in (q, k, v, row, bias, slopes, sinks)]

    def output(q, k, v, row, *terms):
        return call(function, q, k, v, row, intervals, None, *terms, softcap=2.0 * every_term)[0]

    torch.autograd.gradcheck(output, inputs, fast_mode=True)


@FUNCTIONS
@pytest.mark.parametrize("every_term", [False, True])
def test_operator_is_well_defined(function, every_term):
    """opcheck: schema, fake implementations, autograd, and both under AOT tracing."""
    q, k, v, row, intervals = small(M=17, N=19)
    mask = bias = slopes = sinks = None
    if every_term:
        mask = (torch.rand(1, 1, 17, 19) < 0.7).expand(1, 2, 17, 19)
        bias, slopes = torch.randn(1, 2, 17, 19).requires_grad_(), torch.rand(1, 2).requires_grad_()
        sinks = torch.randn(2).requires_grad_() if function == "ssmax" else None
    inputs = (*(t.requires_grad_() for t in (q, k, v, row)), intervals, mask, bias, slopes, sinks)
    options = (function, 0.3, 2.0 * every_term, 0.0, 0)
    forward = torch.ops.hf_sigmoid.flash_forward.default
    torch.library.opcheck(forward, (*inputs, *options, True))

    output, log_sum_exp, *_ = (t.detach() for t in forward(*inputs, *options, False))
    given = [t if t is None else t.detach() for t in inputs]
    backward = torch.ops.hf_sigmoid.flash_backward.default
    arguments = (torch.randn_like(output), output, log_sum_exp, True, *given, *options)
    # Only the forward operator is differentiable, so there is no second derivative to check.
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(backward, arguments, test_utils=tests)


@FUNCTIONS
def test_strides_do_not_matter(function):
    """Transposed, sliced and expanded (stride 0) inputs give the same bits as contiguous ones."""
    q, k, v, row, intervals = small(B=2, H=4, G=2, M=18, N=35)
    row = row[:, :, :1]
    plain = [t.contiguous() for t in (q, k, v, row.expand(2, 4, 18), intervals)]
    other = [
        q.transpose(1, 2).contiguous().transpose(1, 2),
        k.transpose(2, 3).contiguous().transpose(2, 3),
        torch.cat([v, v], -1)[..., : v.shape[-1]],
        row.expand(2, 4, 18),
        intervals[:1].flip(-1).contiguous().flip(-1).expand(2, 18, 2),
    ]
    results = []
    for inputs in (plain, other):
        leaves = [t.detach().requires_grad_() for t in inputs[:4]]
        output, log_sum_exp, *_ = call(function, *leaves, inputs[4])
        results.append((output, log_sum_exp, *torch.autograd.grad(output.square().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert results[0][0].transpose(1, 2).is_contiguous()


@FUNCTIONS
def test_unused_memory_is_never_part_of_a_result(function):
    """NaN around every tensor, in keys that no row sees, and in fresh buffers: nothing changes."""
    q, k, v, row, intervals = small(M=18, N=40)
    intervals = torch.stack([intervals[..., 0] + 3, (intervals[..., 1] - 4).clamp(min=3)], -1)
    results = []
    for filler in (0.0, float("nan")):
        torch.use_deterministic_algorithms(filler != 0.0)  # fills torch.empty with NaN
        try:
            leaves = []
            for tensor in (q, k, v):
                B, heads, length, dim = tensor.shape
                margin = torch.full((B, heads, length + 9, dim + 5), filler)
                inner = margin[:, :, 4 : 4 + tensor.shape[2], 2 : 2 + tensor.shape[3]]
                inner.copy_(tensor)
                if tensor is not q:
                    inner[:, :, :3], inner[:, :, 36:] = filler, filler
                leaves.append(inner.detach().requires_grad_())
            output, *_ = call(function, *leaves, row, intervals)
            results.append((output, *torch.autograd.grad(output.sum(), leaves)))
        finally:
            torch.use_deterministic_algorithms(False)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@FUNCTIONS
@pytest.mark.parametrize(("M", "N"), [(5, 0), (0, 5), (20, 20)])
def test_rows_that_see_nothing_give_zeros(function, M, N):
    q, k, v, row, intervals = small(M=M, N=N)
    sinks = torch.randn(2).requires_grad_() if function == "ssmax" else None
    slopes, bias = torch.rand(1, 2).requires_grad_(), torch.randn(1, 2, M, N).requires_grad_()
    leaves = [t.requires_grad_() for t in (q, k, v, row)]
    output, *_ = call(function, *leaves, 0 * intervals, None, bias, slopes, sinks)
    leaves += [bias, slopes] + ([sinks] if function == "ssmax" else [])
    for result in (output, *torch.autograd.grad(output.sum() + (output * 2).sum(), leaves)):
        assert torch.equal(result, torch.zeros_like(result))


# Relative errors of the forms of σ. The argument of all but rsqrt is near −60, where float32 rounds
# it by 2^-19: 1.3e-6 of the weight. Halley's cubic step from its guess leaves 2^-12.8.
ERRORS = {"rsqrt": 0.0, "pair": 2.0**-19, "halley": 2.0**-12.8}
SCALES = pytest.mark.parametrize("scale", [0, 15, 60])


@SCALES
@pytest.mark.parametrize(("form", "error_of_form"), ERRORS.items())
@pytest.mark.parametrize("log2_n", range(0, 21, 2))
def test_small_weights_keep_their_relative_accuracy(
    monkeypatch, form, scale, error_of_form, log2_n
):
    """Weights of size 1/n with b = −log n: what the approximate tanh of other kernels loses."""
    monkeypatch.setattr(tuning, "form", lambda dtype: form)
    monkeypatch.setattr(tuning, "scale", lambda *_: scale)
    q, k, _, _, _ = small(H=1, M=16, N=32)
    v = torch.eye(32)[None, None]
    row = torch.full((1, 1, 16), -log2_n * math.log(2))
    intervals = torch.tensor([0, 32], dtype=torch.int32).expand(1, 16, 2)
    weights, *_ = call("sigmoid", q, k, v, row, intervals)
    z = q.double() @ k.double().transpose(2, 3) * 8**-0.5
    exact = torch.sigmoid(z + row.double().unsqueeze(-1))
    # The rounding of a logit of size |z + b| moves e^(z + b) by that many eps.
    size = 4 + (z.abs() + row.double().abs().unsqueeze(-1)).max()
    budget = size * torch.finfo(torch.float32).eps + error_of_form
    assert ((weights - exact).abs() / exact).max() <= budget


@SCALES
@pytest.mark.parametrize("form", [*ERRORS, "tanh"])
def test_extreme_logits_saturate(monkeypatch, form, scale):
    """Logits of ±1e4 give weights of 1 and (nearly) 0 and finite gradients, in each form."""
    monkeypatch.setattr(tuning, "form", lambda dtype: form)
    monkeypatch.setattr(tuning, "scale", lambda *_: scale)
    q, k, v, row, intervals = small(H=1, M=16, N=32)
    row = torch.where(torch.arange(16) < 8, 1e4, -1e4)[None, None]
    leaves = [t.requires_grad_() for t in (q, k, v, row)]
    output, *_ = call("sigmoid", *leaves, 0 * intervals + torch.tensor([0, 32], dtype=torch.int32))
    everything = v.sum(2).expand(1, 8, 12)
    budget = 1e-5 + ERRORS.get(form, 0.0) * v.abs().sum(2)
    assert ((output[0, :, :8] - everything).abs() <= budget).all()
    assert output[:, :, 8:].abs().max() < 1e-15
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.sum(), leaves))


@FUNCTIONS
def test_causal_costs_half_of_full(monkeypatch, function):
    """Tiles beyond the diagonal are not visited: products of both passes are counted."""
    products = []
    dot = InterpreterBuilder.create_dot
    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda *args: products.append(1) or dot(*args)
    )
    monkeypatch.setattr(tuning, "tile", tiles(dict.fromkeys(SIZES, (16, 16)), delay=False))
    q, k, v, row, causal = small(H=1, M=144, N=144)
    counts = []
    for intervals in (causal, 0 * causal + torch.tensor([0, 144], dtype=torch.int32)):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        call(function, *leaves, row, intervals)[0].sum().backward()
        counts.append(len(products))
        products.clear()
    # 9 tiles a side: 45 of 81 tiles.
    assert counts[0] / counts[1] == 45 / 81


@pytest.mark.parametrize(
    ("backend", "arch", "dtype", "asked", "expected"),
    [
        ("cuda", 90, torch.bfloat16, None, ("pair", 60)),
        ("cuda", 90, torch.float16, None, ("pair", 15)),
        ("cuda", 80, torch.bfloat16, "tanh", ("tanh", 0)),
        ("cuda", 100, torch.bfloat16, None, ("halley", 60)),
        ("cuda", 100, torch.float16, "tanh", ("halley", 15)),
        ("cuda", 90, torch.float32, "tanh", ("rsqrt", 0)),
        ("hip", "gfx942", torch.bfloat16, "tanh", ("rsqrt", 0)),
        ("hip", "gfx942", torch.float16, None, ("rsqrt", 15)),
    ],
)
def test_form_of_the_sigmoid(monkeypatch, backend, arch, dtype, asked, expected):
    monkeypatch.setattr(tuning, "_target", lambda: (backend, arch))
    if asked:
        monkeypatch.setenv("HF_SIGMOID_FORM", asked)
    form = tuning.form(dtype)
    assert (form, tuning.scale("sigmoid", dtype, form)) == expected


def test_an_unknown_form_is_refused(monkeypatch):
    monkeypatch.setenv("HF_SIGMOID_FORM", "fast")
    with pytest.raises(ValueError, match="accurate or tanh, got 'fast'"):
        tuning.form(torch.bfloat16)


@pytest.mark.parametrize("arch", [70, 80, 86, 89, 90, 100, 103, 120, "gfx90a", "gfx942"])
def test_every_device_has_tiles(monkeypatch, arch):
    """A device without a table of its own takes a safe one."""
    monkeypatch.undo()
    monkeypatch.setattr(tuning, "_target", lambda: ("hip" if "gfx" in str(arch) else "cuda", arch))
    for kernel in ("forward", "dq", "dkdv", "decode"):
        for function in ("sigmoid", "ssmax"):
            for dtype in DTYPES:
                for dim, described in itertools.product((1, 64, 65, 128, 256), (False, True)):
                    tile = tuning.tile(kernel, function, dtype, dim, described)
                    assert tile.num_warps in (4, 8)
                    assert not tile.descriptors or (described and arch == 90)


def laid_out(shape, layout):
    """A random tensor of a shape, in memory as models and caches have theirs."""
    B, G, N, X = shape
    if layout == "heads last":
        return torch.randn(B, N, G, X).transpose(1, 2)
    if layout == "part of a cache":
        return torch.randn(B, G, N + 9, X)[:, :, 4 : N + 4]
    if layout == "odd step of one head":
        return torch.randn(B, N, X).as_strided((B, 1, N, X), (N * X, 7, X, 1)).expand(B, G, N, X)
    if layout == "expanded":
        return torch.randn(B, 1, N, X).expand(shape)
    if layout == "unaligned":
        return torch.randn(B * G * N * X + 1)[1:].view(shape)
    if layout == "odd rows":
        return torch.randn(B, G, N, X + 1)[..., :-1]
    if layout == "dims first":
        return torch.randn(B, G, X, N).transpose(2, 3)
    return torch.randn(shape)


@FUNCTIONS
@pytest.mark.parametrize(
    ("layout", "described"),
    [
        ("heads first", True),
        ("heads last", True),
        ("part of a cache", True),
        ("odd step of one head", True),
        ("expanded", False),
        ("unaligned", False),
        ("odd rows", False),
        ("dims first", False),
    ],
)
def test_descriptors_read_what_pointers_read(monkeypatch, function, layout, described):
    """Of tensors that the copy engine takes; of others the pointers are used."""
    G = 1 if layout == "odd step of one head" else 2
    q, _, _, row, intervals = small(B=2, H=2 * G, G=G, M=20, N=134, D=16, V=32)
    k, v = laid_out((2, G, 134, 16), layout), laid_out((2, G, 134, 32), layout)
    made = []
    monkeypatch.setattr(tuning, "tile", tiles(delay=True))
    expected = call(function, q, k, v, row, intervals)
    describe = tile_helpers.TensorDescriptor
    monkeypatch.setattr(
        tile_helpers, "TensorDescriptor", lambda *args: made.append(args) or describe(*args)
    )
    monkeypatch.setattr(tuning, "tile", tiles(delay=True, descriptors=True))
    found = call(function, q, k, v, row, intervals)
    assert len(made) == (2 if described else 0)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@FUNCTIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_delayed_products_are_those_of_the_plain_loop(monkeypatch, function, dtype):
    """Also of weights that wait packed: they are rounded to the inputs' dtype either way."""
    problem = small(B=1, H=2, M=20, N=134, D=16, V=16, dtype=dtype)
    results = []
    for options in [(False,), (True,), (True, True)]:
        monkeypatch.setattr(tuning, "tile", tiles(SIZES, *options))
        results.append(call(function, *problem)[0])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=1e-6)


@FUNCTIONS
@pytest.mark.parametrize("descriptors", [False, True])
def test_an_infinite_value_is_infinite_wherever_its_tile_lies(monkeypatch, function, descriptors):
    """Before the first tile's weights are there, nothing is multiplied with its values."""
    q, k, v, row, intervals = small(M=20, N=134, D=16, V=16)
    v[:, :, 3, 5] = v[:, :, 70, 6] = float("inf")
    monkeypatch.setattr(tuning, "tile", tiles(delay=False))
    expected = call(function, q, k, v, row, intervals)[0]
    monkeypatch.setattr(tuning, "tile", tiles(delay=True, descriptors=descriptors))
    output = call(function, q, k, v, row, intervals)[0]
    assert output[..., [5, 6]].isposinf().all()
    assert torch.equal(output, expected)


def test_backward_is_the_same_in_every_run():
    generator = torch.Generator().manual_seed(4)
    problem = oracles.make(
        "ssmax", torch.float32, 1, 1, 2, 40, 40, 8, 8, "causal", TERMS, "full", generator
    )
    first, second = (
        problem.solve(functional.ssmax_attention, torch.float32, backend="triton") for _ in range(2)
    )
    for name in first:
        assert torch.equal(first[name], second[name]), name


@FUNCTIONS
@pytest.mark.parametrize("every_term", [False, True])
def test_dropout_is_one_mask_in_every_pass(function, every_term):
    gpu_checks.dropout(function, every_term, "cpu")


@FUNCTIONS
def test_dropout_draws_a_new_mask_each_time_from_torchs_generator(function):
    q, k, v, *_ = small()
    verb = getattr(functional, f"{function}_attention")
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append([verb(q, k, v, dropout=0.5, backend="triton") for _ in range(2)])
    assert torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])
    assert not torch.equal(drawn[0][0], drawn[0][1])
    assert not torch.equal(drawn[0][0], drawn[2][0])


@FUNCTIONS
@pytest.mark.parametrize("log10", [-4, -3, 0, 3])
@pytest.mark.parametrize("log2_n", [0, 10, 17, 20])
def test_float16_keeps_small_weights_and_small_gradients(function, log2_n, log10):
    """Weights of 1/n, and gradients that come in small or large: both are scaled for a product."""
    q, k, v, row, intervals = small(M=20, N=37, D=16, V=16, dtype=torch.float16)
    k, v = (torch.randn(1, 1, 37, 16).half() for _ in range(2))
    row = torch.full_like(row, -log2_n * math.log(2) if function == "sigmoid" else 0.5)
    direction = (torch.randn(1, 2, 20, 16) * 10.0**log10).half()
    name = "bias" if function == "sigmoid" else "multiplier"
    shown = (torch.arange(37) >= intervals[..., :1]) & (torch.arange(37) < intervals[..., 1:])

    def exactly(q, k, v):
        plain = getattr(reference, f"{function}_attention")
        return plain(q, k, v, **{name: row.double()}, visible=shown[:, None])

    results = []
    for dtype, solve in (
        (torch.float16, lambda *leaves: call(function, *leaves, row, intervals)),
        (torch.float64, exactly),
    ):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        output = solve(*leaves)[0]
        gradients = torch.autograd.grad(output, leaves, direction.to(dtype))
        results.append([x.double() for x in (output, *gradients)])
    for name, found, exact in zip(("output", "dq", "dk", "dv"), *results, strict=True):
        error = (found - exact).norm() / exact.norm()
        # What the result's own dtype can hold of it, and a rounding or two of its terms.
        stored = (exact.half().double() - exact).norm() / exact.norm()
        assert error <= 2 * stored + 2.0**-10, (name, error)


@FUNCTIONS
def test_tiles_that_a_dense_mask_leaves_empty_are_not_visited(monkeypatch, function):
    """Products of both passes are counted: those of the tiles that are seen, and no others."""
    products = []
    dot = InterpreterBuilder.create_dot
    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda *args: products.append(1) or dot(*args)
    )
    monkeypatch.setattr(tuning, "tile", tiles(dict.fromkeys(SIZES, (16, 16)), delay=False))
    q, k, v, row, _ = small(H=2, M=96, N=96)
    everything = torch.tensor([0, 96], dtype=torch.int32).expand(1, 96, 2)
    tile = torch.arange(96) // 16
    mask = (tile[:, None] % 3 == tile % 3).expand(1, 2, 96, 96)  # 2 of 6 tiles a row
    counts = []
    for seen in (torch.ones_like(mask), mask):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        call(function, *leaves, row, everything, seen)[0].sum().backward()
        counts.append(len(products))
        products.clear()
    assert counts[1] * 3 == counts[0]


@pytest.mark.parametrize(
    ("version", "waits"), [("12.8", True), ("12.9", True), ("13.3", False), ("13.4", False)]
)
def test_an_assembler_that_loses_registers_is_waited_for(monkeypatch, version, waits):
    """On Hopper alone, where products run while the program goes on."""
    monkeypatch.undo()
    monkeypatch.setattr(tuning, "get_ptxas", lambda arch: SimpleNamespace(version=version))
    tuning.keeps_registers.cache_clear()
    for arch in (80, 90, 120):
        monkeypatch.setattr(tuning, "_target", lambda arch=arch: ("cuda", arch))
        for kernel in ("forward", "dq", "dkdv", "decode"):
            tile = tuning.tile(kernel, "sigmoid", torch.bfloat16, 128, described=True)
            assert tile.wait == (waits and arch == 90)
            assert not (tile.wait and tile.delay)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tuning.warn_of_assembler()
    assert [f"ptxas {version}" in str(warning.message) for warning in caught] == [True] * waits
    tuning.keeps_registers.cache_clear()


@FUNCTIONS
def test_waiting_for_a_product_changes_no_bit(monkeypatch, function):
    results = []
    for wait in (False, True):
        tile = tuning.Tile(16, 16, 4, 1, wait=wait)
        monkeypatch.setattr(tuning, "tile", lambda *_, tile=tile, **__: tile)
        torch.manual_seed(0)
        *leaves, intervals = small(dtype=torch.bfloat16)
        leaves = [t.requires_grad_() for t in leaves]
        output = call(function, *leaves, intervals)[0]
        results.append([output, *torch.autograd.grad(output.float().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
