"""What callers of the Triton kernels rely on beyond their numbers.

Every element is written, nothing that is not part of a call is read, few queries take the decode
kernel, statistics are what they say, and nothing waits for the device.
"""

import functools
from contextlib import nullcontext

import interpreter
import oracles
import pytest
import tiny_models
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import StaticCache

from hf_sigmoid import functional, reference
from hf_sigmoid.compat import CACHE
from hf_sigmoid.kernels import flash
from hf_sigmoid.kernels.flash import backward as backward_kernels
from hf_sigmoid.kernels.flash import decode, masked, tuning
from hf_sigmoid.kernels.flash import forward as forward_kernels
from hf_sigmoid.kernels.flash import ops as flash_ops
from hf_sigmoid.kernels.flash import tiles as tile_helpers

interpreter.install()
TERMS = {"softcap", "alibi_slopes", "logit_bias", "sinks"}
FUNCTIONS = pytest.mark.parametrize("function", ["sigmoid", "ssmax"])
NAN, INF = float("nan"), float("inf")
EPS = torch.finfo(torch.float32).eps
# Several tiles in each direction at these tests' sizes.
TILES = {"forward": (16, 32), "dq": (32, 16), "dkdv": (16, 16), "decode": (16, 16)}
PREFILL, DECODE = (20, 37), (2, 50)  # queries and keys
ROUTES = pytest.mark.parametrize(("M", "N"), [PREFILL, DECODE], ids=["prefill", "decode"])


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    tile = {kernel: tuning.Tile(*sizes, 4, 1, delay=True) for kernel, sizes in TILES.items()}
    monkeypatch.setattr(tuning, "tile", lambda kernel, *_, **__: tile[kernel])
    monkeypatch.setattr(tuning, "LEAST_KEYS_TO_SPLIT", 16)


@pytest.fixture
def launches(monkeypatch):
    """How often each of the two forward launchers ran."""
    counts = {"prefill": 0, "decode": 0}

    def counted(name, launch):
        def run(*args):
            counts[name] += 1
            return launch(*args)

        return run

    monkeypatch.setattr(flash_ops, "prefill", counted("prefill", flash_ops.prefill))
    monkeypatch.setattr(decode, "decode", counted("decode", decode.decode))
    return counts


def verb(function, backend="triton"):
    return functools.partial(getattr(functional, f"{function}_attention"), backend=backend)


def intervals_of(kind, B, M, N):
    """int32 [B, M, 2]; "nothing", "causal" and "falling" have rows that see nothing."""
    rows = torch.arange(M)
    if kind == "all":
        lo, hi = 0 * rows, 0 * rows + N
    elif kind == "padded":
        lo, hi = 0 * rows + 5, 0 * rows + N
    elif kind == "nothing":
        lo, hi = rows, rows
    elif kind == "causal":
        lo, hi = 0 * rows, (rows + 1 + N - M).clamp(min=0)
        hi = torch.where(rows % 5 == 3, 0, hi)
    else:  # neither end rises with the row
        lo, hi = 3 + 7 * rows % 5, N - 4 - 5 * rows % 11
        hi = torch.where(rows % 5 == 1, lo, hi.maximum(lo))
    return torch.stack([lo, hi], -1).clamp(0, N).int().expand(B, M, 2)


def operands(function, M, N, kind="falling", every_term=False, B=1, G=1, R=2, D=8, V=12):
    """The tensors of an operator call, by name; float32."""
    H = G * R
    tensors = {
        "query": torch.randn(B, H, M, D),
        "key": torch.randn(B, G, N, D),
        "value": torch.randn(B, G, N, V),
        "row": torch.randn(B, H, M),
        "intervals": intervals_of(kind, B, M, N),
        "mask": None,
        "logit_bias": None,
        "alibi_slopes": None,
        "sinks": None,
    }
    if every_term:
        tensors["mask"] = torch.rand(B, H, M, N) < 0.7
        tensors["logit_bias"] = torch.randn(B, H, M, N)
        tensors["alibi_slopes"] = torch.rand(B, H)
        if function == "ssmax":
            tensors["sinks"] = torch.randn(H)
    return tensors


def run(function, tensors, direction=None, every_term=False, statistics=True):
    """Results and gradients of an operator call, by name."""
    leaves = {
        name: t.detach().requires_grad_() if t is not None and t.is_floating_point() else t
        for name, t in tensors.items()
    }
    softcap = 2.0 if every_term else 0.0
    output, *rest = flash.attention(
        *leaves.values(), function, 0.3, softcap, 0.0, 0, statistics
    )  # fmt: skip
    wanted = {name: t for name, t in leaves.items() if t is not None and t.requires_grad}
    direction = torch.ones_like(output) if direction is None else direction
    gradients = torch.autograd.grad(output, list(wanted.values()), direction)
    names = ("output", "log_sum_exp", "max_logit", "weight_sum", *(f"d{name}" for name in wanted))
    return dict(zip(names, (output.detach(), *rest, *gradients), strict=True))


def assert_same_bits(given, expected):
    for name, tensor in expected.items():
        assert torch.equal(given[name], tensor), name


# 1. Every element is written.


@pytest.fixture
def fill_new_memory(monkeypatch):
    """Makes torch's allocations start as a number (int32: as another); lists their shapes."""
    filled = []

    def use(number, integer):
        def wrap(allocate):
            def allocate_filled(*args, **kwargs):
                tensor = allocate(*args, **kwargs)
                filled.append(tensor.shape)
                if tensor.is_floating_point():
                    return tensor.fill_(number)
                return tensor.fill_(integer) if tensor.dtype == torch.int32 else tensor

            return allocate_filled

        for owner, name in (
            (torch.Tensor, "new_empty"), (torch, "empty"), (torch, "empty_like"),
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
        return filled

    return use


@FUNCTIONS
@pytest.mark.parametrize(
    ("M", "N", "kind", "B", "every_term"),
    [
        pytest.param(20, 37, "falling", 1, False, id="ragged"),
        pytest.param(20, 37, "falling", 1, True, id="ragged_every_term"),
        pytest.param(20, 37, "nothing", 1, True, id="prefill_sees_nothing"),
        pytest.param(3, 5, "all", 1, True, id="smaller_than_a_tile"),
        pytest.param(35, 4, "causal", 1, False, id="fewer_keys_than_queries"),
        pytest.param(5, 0, "all", 1, True, id="no_keys"),
        pytest.param(0, 5, "all", 1, True, id="no_queries"),
        pytest.param(5, 7, "all", 0, True, id="no_batch"),
        pytest.param(2, 50, "falling", 1, True, id="decode"),
        pytest.param(1, 17, "all", 2, False, id="decode_one_query"),
        pytest.param(3, 50, "nothing", 1, True, id="decode_sees_nothing"),
    ],
)
def test_every_element_is_written(function, M, N, kind, B, every_term, fill_new_memory, launches):
    tensors = operands(function, M, N, kind, every_term, B=B)
    direction = torch.randn(B, 2, M, 12)
    filled = fill_new_memory(NAN, 12345)
    results = run(function, tensors, direction, every_term)
    assert len(filled) >= 10
    assert launches["decode"] == (M * 8 <= N and M * B > 0)
    for name, result in results.items():
        assert not result.isnan().any(), name
        assert name in ("log_sum_exp", "max_logit") or result.isfinite().all(), name


@FUNCTIONS
@pytest.mark.parametrize(
    ("M", "N", "kind", "every_term"),
    [
        pytest.param(*PREFILL, "padded", False, id="prefill_with_full_tiles"),
        pytest.param(*DECODE, "falling", True, id="decode"),
    ],
)
def test_what_new_memory_holds_does_not_matter(function, M, N, kind, every_term, fill_new_memory):
    tensors = operands(function, M, N, kind, every_term)
    results = []
    for number, integer in ((0.0, 0), (NAN, 2**31 - 1)):
        fill_new_memory(number, integer)
        results.append(run(function, tensors, every_term=every_term))
    assert_same_bits(results[1], results[0])


@FUNCTIONS
@ROUTES
def test_statistics_do_not_need_values(function, M, N):
    tensors = operands(function, M, N)
    expected = run(function, tensors)
    tensors["value"] = tensors["value"][..., :0]
    given = run(function, tensors)
    for name in ("log_sum_exp", "max_logit", "weight_sum"):
        torch.testing.assert_close(given[name], expected[name])


# 2. Nothing outside of a call is read.


def embed(tensor, filler):
    """The tensor as a view into a larger one that is `filler` on every side."""
    if tensor is None:
        return None
    if tensor.dtype == torch.bool:
        filler = True  # a hidden key would become a visible one
    elif not tensor.is_floating_point():
        filler = 11
    around = torch.full([size + 5 for size in tensor.shape], filler, dtype=tensor.dtype)
    inner = around[tuple(slice(2, 2 + size) for size in tensor.shape)]
    return inner.copy_(tensor)


@FUNCTIONS
@ROUTES
@pytest.mark.parametrize("every_term", [False, True], ids=["plain", "every_term"])
def test_memory_around_every_tensor_is_not_read(function, M, N, every_term, launches):
    tensors = operands(function, M, N, "falling" if every_term else "padded", every_term)
    direction = torch.randn(1, 2, M, 12)
    expected = run(function, tensors, direction, every_term)
    around = {name: embed(tensor, NAN) for name, tensor in tensors.items()}
    assert_same_bits(run(function, around, embed(direction, NAN), every_term), expected)
    assert launches == ({"prefill": 2, "decode": 0} if M == 20 else {"prefill": 0, "decode": 2})


@FUNCTIONS
@ROUTES
@pytest.mark.parametrize(
    ("names", "every_term", "filler"),
    [
        pytest.param(("key", "value", "logit_bias"), True, NAN, id="every_term-nan"),
        pytest.param(("key", "value"), False, INF, id="plain-inf"),
    ],
)
def test_keys_that_no_row_sees_may_hold_anything(function, M, N, names, every_term, filler):
    """A static cache's unused tail, and left padding."""
    tensors = operands(function, M, N, "falling", every_term)
    direction = torch.randn(1, 2, M, 12)
    lo, hi = tensors["intervals"].unbind(-1)
    first, last = lo[lo < hi].min(), hi[lo < hi].max()
    assert 0 < first < last < N
    results = []
    for number in (0.0, filler):
        for name in names:
            # Keys are the last dimension of a logit bias.
            keys = tensors[name] if name == "logit_bias" else tensors[name].mT
            keys[..., :first] = keys[..., last:] = number
        results.append(run(function, tensors, direction, every_term))
    assert_same_bits(results[1], results[0])


@FUNCTIONS
@ROUTES
def test_rows_that_see_nothing_may_hold_anything(function, M, N):
    """In the queries, and in what comes back to them."""
    tensors = operands(function, M, N, "falling", True)
    tensors["direction"] = torch.randn(1, 2, M, 12)
    lo, hi = tensors["intervals"][0].unbind(-1)
    assert (lo == hi).any() and (lo < hi).any()
    results = []
    for number in (0.0, NAN):
        for name in ("query", "direction"):
            tensors[name][:, :, lo == hi] = number
        inputs = dict(tensors)
        results.append(run(function, inputs, inputs.pop("direction"), True))
    assert_same_bits(results[1], results[0])


@FUNCTIONS
@ROUTES
def test_intervals_beyond_the_keys_are_cut(function, M, N):
    """The operator takes what no mask function makes: ends outside [0, N], and hi below lo."""
    tensors = operands(function, M, N)
    lo, hi = tensors["intervals"].unbind(-1)
    rows = torch.arange(M)
    lo, hi = torch.where(rows % 3 == 0, -9, lo), torch.where(rows % 4 == 0, N + 99, hi)
    hi = torch.where(rows == M - 1, lo - 2, hi)
    wild = torch.stack([lo, hi], -1).int()
    lo = lo.clamp(0, N)
    cut = torch.stack([lo, hi.clamp(0, N).maximum(lo)], -1).int()
    results = [
        run(function, {name: embed(t, NAN) for name, t in {**tensors, "intervals": ends}.items()})
        for ends in (cut, wild)
    ]
    assert not results[0]["output"].isnan().any()
    assert_same_bits(results[1], results[0])


# 3. Decode.


@pytest.mark.parametrize(
    ("M", "N", "serves"),
    [
        (1, 16, True),
        (1, 15, False),  # too short
        (2, 16, True),
        (3, 23, False),  # fewer than 8 keys a query
        (3, 24, True),
        (32, 512, True),
        (260, 4096, True),  # 17 tiles of 4 heads: two programs a multiprocessor are left over
        (280, 4096, False),
    ],
)
def test_few_queries_of_many_keys_are_decoded(monkeypatch, M, N, serves):
    monkeypatch.setattr(tuning, "multiprocessors", lambda: 2 * 4 * 17)
    query, value = torch.empty(1, 4, M, 8), torch.empty(1, 2, N, 8)
    assert decode.serves(query, value, "sigmoid") == serves


@FUNCTIONS
@pytest.mark.parametrize(
    ("M", "R", "mask", "terms", "shares"),
    [
        pytest.param(1, 1, "none", set(), None, id="one_query_one_head"),
        pytest.param(2, 3, "intervals", TERMS, None, id="intervals_do_not_rise"),
        pytest.param(7, 8, "dense_causal", TERMS, None, id="seven_queries_of_eight_heads"),
        pytest.param(16, 8, "causal", set(), None, id="more_pairs_than_a_tile"),
        pytest.param(2, 4, "window", TERMS, 20, id="shares_that_see_nothing"),
        pytest.param(2, 2, "intervals", TERMS, 1, id="one_share"),
        pytest.param(1, 5, "dense", set(), 3, id="mask_and_five_heads"),
    ],
)
def test_decode_equals_prefill(monkeypatch, launches, function, M, R, mask, terms, shares):
    """Within rounding, statistics included."""
    generator = torch.Generator().manual_seed(M * 10 + R)
    G, N = (1, 128) if R == 8 else (2, 75)
    problem = oracles.make(
        function, torch.float32, 1, G, R, M, N, 8, 12, mask, terms, "full", generator
    )
    if shares:
        monkeypatch.setattr(tuning, "splits", lambda *_: shares)
    tensors = {name: t.float() for name, t in problem.tensors.items()}
    results = []
    for serves in (True, False):
        monkeypatch.setattr(decode, "serves", lambda *_, serves=serves: serves)
        output, statistics = verb(function)(**tensors, **problem.options, return_statistics=True)
        results.append((output, *statistics))
    assert launches == {"prefill": 1, "decode": 1}
    size = oracles.magnitudes(problem, amplified=True)["output"]
    assert (results[0][0] - results[1][0]).abs().max() <= 4 * EPS * size
    for decoded, prefilled in zip(*(r[1:] for r in results), strict=True):
        torch.testing.assert_close(decoded, prefilled, rtol=32 * EPS, atol=32 * EPS)


@pytest.mark.parametrize(
    ("programs", "key_tiles", "expected"),
    [(1, 1000, 125), (1, 3, 1), (1, 9, 3), (132, 1000, 2), (1, 0, 1), (32, 256, 8), (96, 512, 8)],
)
def test_shares_fill_the_gpu_and_are_not_too_small(monkeypatch, programs, key_tiles, expected):
    monkeypatch.setattr(tuning, "multiprocessors", lambda: 132)
    tuning.splits.cache_clear()
    assert tuning.splits(programs, key_tiles) == expected


@pytest.mark.parametrize("programs", [8, 16, 32, 40, 64, 96, 128, 200, 256, 300])
def test_waves_of_decoding_are_nearly_full(monkeypatch, programs):
    """Of the multiprocessors' time at 32k keys, in tiles of 128, at least 0.85 is spent on keys."""
    monkeypatch.setattr(tuning, "multiprocessors", lambda: 132)
    tuning.splits.cache_clear()
    shares = tuning.splits(programs, 256)
    waves, share = -(-programs * shares // 264), -(-256 // shares)
    assert programs * 256 / (264 * waves * share) >= 0.85


@pytest.mark.parametrize(
    ("programs", "heads", "expected"),
    [(132, 8, 1), (131, 8, 2), (16, 8, 8), (16, 16, 16), (66, 6, 2), (1, 7, 7), (50, 1, 1)],
)
def test_query_heads_of_a_group_are_shared_out_where_programs_are_few(
    monkeypatch, programs, heads, expected
):
    monkeypatch.setattr(tuning, "multiprocessors", lambda: 132)
    assert tuning.parts(programs, heads) == expected


@FUNCTIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_parts_of_a_group_add_up(monkeypatch, function, dtype):
    """Gradients of keys and values, whichever number of programs their query heads are split to."""
    tensors = operands(function, 20, 37, "falling", B=2, G=2, R=6)
    tensors |= {name: tensors[name].to(dtype) for name in ("query", "key", "value")}
    direction = torch.randn(2, 12, 20, 12).to(dtype)
    results = []
    for parts in (1, 3, 6):
        monkeypatch.setattr(tuning, "parts", lambda *_, parts=parts: parts)
        results.append(run(function, tensors, direction))
    for result in results[1:]:
        for name, expected in results[0].items():
            torch.testing.assert_close(result[name], expected, msg=name)


@FUNCTIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_pass_through_a_decode(function, dtype, launches):
    generator = torch.Generator().manual_seed(5)
    problem = oracles.make(
        function, dtype, 1, 2, 2, 3, 50, 8, 12, "intervals", TERMS, "full", generator
    )
    oracles.check(problem, "triton")
    assert launches == {"prefill": 0, "decode": 1}


@FUNCTIONS
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_generate_decodes_by_the_decode_kernel(monkeypatch, launches, function, static):
    model, ids = tiny_models.converted("llama", function), tiny_models.tokens(1, 12)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    name = f"{function}_attention"
    plain = getattr(functional, name)
    results = []
    for backend in ("torch", "triton"):
        monkeypatch.setattr(functional, name, functools.partial(plain, backend=backend))
        cache = {}
        if static:  # longer than the text: its tail stays unused
            cache = {CACHE: StaticCache(config=model.config, max_cache_len=40)}
        results.append(model.generate(ids, **options, **cache))
    # The first step reads the prompt; caches are shorter than 16 keys at the first few steps.
    layers, steps = 2, 5
    expected = layers * steps if static else layers * 2
    assert launches["decode"] == expected
    assert launches["prefill"] == layers * (steps + 1) - expected
    assert torch.equal(results[0].sequences, results[1].sequences)
    torch.testing.assert_close(
        torch.stack(results[0].logits), torch.stack(results[1].logits), rtol=1e-4, atol=1e-4
    )


# 4. Statistics.


def exact_statistics(problem, dtype=torch.float64):
    """Largest logit and sum of weights from the reference."""
    given = {**problem.options, **problem.tensors}
    given = {
        name: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for name, t in given.items()
    }
    plain = getattr(reference, f"{problem.function}_attention")
    weight_sum = plain(**given, upcast=False)[1].sum(-1)
    names = ("query", "key", "value", "scaling", "visible", "is_causal", "softcap", "alibi_slopes",
             "logit_bias")  # fmt: skip
    z, hidden, _ = reference.logits_of(*(given.get(name) for name in names), upcast=False)
    row = given["bias" if problem.function == "sigmoid" else "multiplier"].unsqueeze(-1)
    logits = z + row if problem.function == "sigmoid" else z * row
    return logits.masked_fill(hidden, -INF).amax(-1), weight_sum


def assert_statistics(problem, **options):
    """max_logit and weight_sum err at most twice as much as the reference in float32."""
    exact, own = exact_statistics(problem), exact_statistics(problem, torch.float32)
    tensors = {name: t.float() for name, t in problem.tensors.items()}
    options = {**problem.options, **options}
    _, statistics = getattr(functional, f"{problem.function}_attention")(
        **tensors, **options, return_statistics=True
    )
    nothing = exact[0] == -INF
    assert torch.equal(statistics.max_logit == -INF, nothing)
    assert torch.equal(statistics.weight_sum[nothing], torch.zeros(int(nothing.sum())))
    largest = exact[0][~nothing].abs().amax() if (~nothing).any() else 0.0
    for given, right, plain in zip(statistics, exact, own, strict=True):
        assert given.dtype == torch.float32 and not given.requires_grad
        given, right, plain = (x.double().masked_fill(nothing, 0.0) for x in (given, right, plain))
        # Every logit is rounded, and so e^logit by as much as the logit itself.
        budget = 2 * (plain - right).abs().amax() + 8 * EPS * (1 + largest) * right.abs().amax()
        assert ((given - right).abs() <= budget.clamp(min=8 * EPS)).all()


@FUNCTIONS
@ROUTES
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("mask", oracles.MASKS)
def test_statistics_are_right(function, M, N, backend, mask, launches):
    for terms in (set(), TERMS):
        generator = torch.Generator().manual_seed(6)
        problem = oracles.make(
            function, torch.float32, 1, 1, 2, M, N, 8, 12, mask, terms, "full", generator
        )
        assert_statistics(problem, backend=backend)
    route = "prefill" if PREFILL[0] == M else "decode"
    assert launches[route] == (2 if backend == "triton" else 0)


@FUNCTIONS
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("M", "N"), [(32, 64), (1, 70)], ids=["prefill_full_tiles", "decode"]
)  # full tiles take the largest score before they multiply it
@pytest.mark.parametrize(("scaling", "sign"), [(-0.4, 1), (0.4, -1), (-0.4, -1)])
def test_statistics_of_negative_factors_are_right(function, M, N, backend, scaling, sign):
    generator = torch.Generator().manual_seed(7)
    problem = oracles.make(
        function, torch.float32, 1, 1, 1, M, N, 8, 4, "none", set(), "full", generator
    )
    name = "bias" if function == "sigmoid" else "multiplier"
    problem.tensors[name] = problem.tensors[name].abs() * sign
    problem.options["scaling"] = scaling
    assert_statistics(problem, backend=backend)


@ROUTES
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_sink_is_no_logit_but_takes_its_share(M, N, backend):
    q, k, v = torch.randn(1, 2, M, 8), torch.randn(1, 1, N, 8), torch.randn(1, 1, N, 8)
    sinks = torch.tensor([60.0, -60.0])
    _, without = verb("ssmax", backend)(q, k, v, return_statistics=True)
    _, log_sum_exp, given = verb("ssmax", backend)(
        q, k, v, sinks=sinks, return_statistics=True, return_log_sum_exp=True
    )
    assert torch.equal(given.max_logit, without.max_logit)
    assert (given.max_logit < 20).all()
    torch.testing.assert_close(log_sum_exp[:, 0], torch.full((1, M), 60.0))
    assert (given.weight_sum[:, 0] < 1e-15).all()
    torch.testing.assert_close(given.weight_sum[:, 1], torch.ones(1, M))


@FUNCTIONS
@ROUTES
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_asking_for_statistics_changes_no_bit(function, M, N, backend):
    # A soft cap, because without any term the torch backend's ssmax is another function, PyTorch's.
    terms = {"softcap"} if backend == "torch" else set()
    generator = torch.Generator().manual_seed(8)
    problem = oracles.make(
        function, torch.float32, 1, 1, 2, M, N, 8, 12, "causal", terms, "full", generator
    )
    results = []
    for asked in (False, True):
        leaves = [t.float().requires_grad_() for t in problem.tensors.values()]
        output = verb(function, backend)(
            **dict(zip(problem.tensors, leaves, strict=True)),
            **problem.options,
            return_statistics=asked,
        )
        output = output[0] if asked else output
        results.append((output, *torch.autograd.grad(output.square().sum(), leaves)))
    for without, given in zip(*results, strict=True):
        assert torch.equal(without, given)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_a_call_returns(backend):
    q = torch.randn(1, 2, 3, 8)
    assert isinstance(verb("sigmoid", backend)(q, q, q), torch.Tensor)
    assert isinstance(verb("ssmax", backend)(q, q, q), torch.Tensor)
    for function in ("sigmoid", "ssmax"):
        output, statistics = verb(function, backend)(q, q, q, return_statistics=True)
        assert output.shape == (1, 2, 3, 8)
        assert isinstance(statistics, functional.Statistics)
        assert statistics.max_logit.shape == statistics.weight_sum.shape == (1, 2, 3)
    output, log_sum_exp = verb("ssmax", backend)(q, q, q, return_log_sum_exp=True)
    assert log_sum_exp.shape == (1, 2, 3)
    both = verb("ssmax", backend)(q, q, q, return_log_sum_exp=True, return_statistics=True)
    assert len(both) == 3
    torch.testing.assert_close(both[1], log_sum_exp)  # on a CPU statistics take another path
    assert isinstance(both[2], functional.Statistics)


@FUNCTIONS
def test_the_reference_has_no_statistics(function):
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"return_statistics needs backend .* got 'reference'"):
        verb(function, "reference")(q, q, q, return_statistics=True)


# 5. Nothing waits for the device.


class Device(TorchDispatchMode):
    """A device whose memory cannot be read, "meta", and no copies between it and the CPU."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if operation is not torch.ops.prim.device.default:
            devices = {
                leaf.device.type
                for leaf in tree_leaves((args, kwargs, result))
                if isinstance(leaf, torch.Tensor)
            }
            assert len(devices) < 2, f"{operation} is between {devices}"
        return result


@pytest.fixture
def launched(monkeypatch):
    """Replaces every kernel and the device's context; what was launched, with its grid."""
    launched = []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *_, **__: launched.append((self.name, grid))

    for module, names in (
        (forward_kernels, ["_forward"]),
        (decode, ["_decode", "_combine"]),
        (backward_kernels, ["backward_dq", "backward_dbias", "query_ranges", "backward_dkdv"]),
        (masked, ["_list_tiles"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Kernel(name))
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    return launched


def on_the_device(function, M, N, every_term):
    tensors = operands(function, M, N, "all", every_term)
    return {name: None if t is None else t.to("meta") for name, t in tensors.items()}


@FUNCTIONS
@ROUTES
@pytest.mark.parametrize("visible", ["intervals", "mask", None])
@pytest.mark.parametrize("every_term", [False, True], ids=["plain", "every_term"])
def test_verbs_never_wait_for_the_device(
    monkeypatch, launched, function, M, N, visible, every_term
):
    """A captured CUDA graph is the same work whatever its tensors hold."""
    # The launcher itself: the operator would take its fake implementation.
    monkeypatch.setattr(flash, "attention", flash_ops.forward)
    given = on_the_device(function, M, N, every_term)
    given["mask"] = torch.empty(1, 1, M, N, dtype=torch.bool, device="meta")
    options = {"visible": given.get(visible), "is_causal": True, "return_statistics": True}
    if every_term:
        options |= {name: given[name] for name in ("logit_bias", "alibi_slopes")}
        options["softcap"] = 2.0
    if function == "ssmax":
        options |= {"sinks": given["sinks"], "return_log_sum_exp": True}
    name = "bias" if function == "sigmoid" else "multiplier"
    for row in (given["row"], 0.7):
        with Device():
            results = verb(function)(
                given["query"], given["key"], given["value"], **{name: row}, **options
            )
        assert all(leaf.device.type == "meta" for leaf in tree_leaves(results))
    kernels = ["_forward"] if PREFILL[0] == M else ["_decode", "_combine"]
    if visible == "mask" and PREFILL[0] == M:
        kernels = ["_list_tiles", *kernels]
    assert [name for name, _ in launched] == kernels * 2


@FUNCTIONS
@ROUTES
@pytest.mark.parametrize("every_term", [False, True], ids=["plain", "every_term"])
def test_backward_never_waits_for_the_device(launched, function, M, N, every_term):
    given = on_the_device(function, M, N, every_term)
    options = (function, 0.3, 0.0, 0.0, 0)
    output, log_sum_exp, *_ = flash_ops.forward(*given.values(), *options, False)
    launched.clear()
    with Device():
        flash_ops.backward(output, output, log_sum_exp, True, *given.values(), *options)
    kernels = ["backward_dq", "query_ranges", "backward_dkdv"]
    if every_term:
        kernels = ["_list_tiles", "backward_dq", "backward_dbias", "_list_tiles",
                   "backward_dkdv"]  # fmt: skip
    assert [name for name, _ in launched] == kernels


@FUNCTIONS
@pytest.mark.parametrize("M", [1, 20], ids=["decode", "prefill"])
def test_any_batch_fits_the_grid(launched, function, M):
    """Only the first axis of a CUDA grid goes beyond 65,535."""
    B, N = 70_000, 300
    q, k = (torch.empty(B, 1, length, 8, device="meta") for length in (M, N))
    row = torch.empty(B, 1, M, device="meta")
    intervals = torch.empty(B, M, 2, dtype=torch.int32, device="meta")
    inputs = (q, k, k, row, intervals, None, None, None, None, function, 0.3, 0.0, 0.0, 0)
    output, log_sum_exp, *_ = flash_ops.forward(*inputs, False)
    flash_ops.backward(output, output, log_sum_exp, False, *inputs)
    assert len(launched) >= 4
    assert all(size < 1 << 16 for _, grid in launched for size in grid[1:])


def test_the_device_of_these_tests_notices_what_it_should():
    tensor = torch.empty(3, device="meta")
    for read in (bool, float, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.nonzero):
        with Device(), pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
            read(tensor.sum())
    with Device(), pytest.raises(AssertionError, match="between"):
        torch.empty(3).to("meta")


# 6. Compiled, under autocast, recomputed.


@FUNCTIONS
@pytest.mark.parametrize(
    "lengths",
    [[(20, 37), (18, 18)], [(1, 40), (1, 66)]],
    ids=["prefill", "decode"],
)
def test_one_compiled_graph_serves_every_length(monkeypatch, function, lengths, launches):
    torch._dynamo.reset()
    # Asked of the environment, which cannot be traced; never asked of tensors on a GPU.
    monkeypatch.setattr(functional, "_interprets", lambda: True)
    counter = CompileCounterWithBackend("aot_eager")

    def call(q, k, v, row):
        name = "bias" if function == "sigmoid" else "multiplier"
        output, statistics = verb(function)(
            q, k, v, **{name: row}, is_causal=True, return_statistics=True
        )
        return output, statistics.max_logit, statistics.weight_sum

    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    compilations = []
    for M, N in lengths:
        t = operands(function, M, N)
        leaves = [t[name].requires_grad_() for name in ("query", "key", "value", "row")]
        results = []
        for f in (call, compiled):
            output, *statistics = f(*leaves)
            gradients = torch.autograd.grad(output.square().sum(), leaves)
            results.append((output, *statistics, *gradients))
        for eager, given in zip(*results, strict=True):
            assert torch.equal(eager, given)
        compilations.append(counter.frame_count)
    # The first one restarts, for a float that depends on a size: 1/√D.
    assert compilations[-1] == compilations[0] <= 2
    assert launches["decode"] == (2 * len(lengths) if lengths[0][0] == 1 else 0)


@FUNCTIONS
@pytest.mark.parametrize(
    ("M", "N", "dtype"),
    [
        pytest.param(*PREFILL, torch.float32, id="prefill"),
        pytest.param(*DECODE, torch.bfloat16, id="decode_bf16"),
    ],
)
def test_autocast_and_recomputation_change_no_gradient(function, M, N, dtype):
    t = operands(function, M, N)
    q, k, v = (t[name].to(dtype).requires_grad_() for name in ("query", "key", "value"))
    leaves = [q, k, v, t["row"].requires_grad_()]
    name = "bias" if function == "sigmoid" else "multiplier"

    def call(q, k, v, row):
        return verb(function)(q, k, v, **{name: row}, is_causal=True)

    def autocast(*leaves):
        with torch.autocast("cpu", torch.bfloat16):
            return call(*leaves)

    def recomputed(*leaves):
        return checkpoint(call, *leaves, use_reentrant=False)

    results = []
    for f in (call, autocast, recomputed):
        output = f(*leaves)
        assert output.dtype == dtype
        results.append((output, *torch.autograd.grad(output.float().square().sum(), leaves)))
    for plain, *others in zip(*results, strict=True):
        for other in others:
            assert torch.equal(plain, other)


# 7. Offsets of 64 bits.


@pytest.mark.parametrize(
    ("stride", "wide"), [((1 << 23) - 1, False), (1 << 23, True)], ids=["below", "at_the_limit"]
)
@pytest.mark.parametrize("name", ["query", "key", "value", "output"])
@pytest.mark.parametrize("axis", [2, 3], ids=["rows", "dims"])
def test_offsets_are_wide_where_a_tile_may_pass_31_bits(name, axis, stride, wide):
    """256 rows and dims are the largest tile."""
    tensors = {n: torch.empty(1, 2, 5, 8, device="meta") for n in ("query", "key", "value")}
    tensors["output"] = torch.empty(1, 2, 5, 8, device="meta")
    strides = [0, 0, 0, 0]
    strides[axis] = stride
    tensors[name] = torch.empty_strided((1, 2, 5, 8), strides, device="meta")
    for other in tensors:
        if other != name:
            tensors[other] = torch.empty_strided((1, 2, 5, 8), (0, 0, 0, 0), device="meta")
    given = tile_helpers.constants(
        tensors["query"], tensors["key"], tensors["value"], "ssmax", 0.0, tensors["output"]
    )
    assert str(given["INDEX"]) == ("int64" if wide else "int32")


@FUNCTIONS
@pytest.mark.parametrize("M", [16, 2], ids=["prefill", "decode"])
@pytest.mark.parametrize("far", ["rows", "dims"])
def test_tensors_wider_than_31_bits_give_the_same_bits(function, M, far, launches):
    """Elements of one tile lie more than 2^31 apart, in memory that is reserved and not used."""
    D, N, far_stride = 16, 16, 9 << 24
    assert 15 * far_stride > 1 << 31
    # An offset that wraps around must not leave the reserved memory: it would crash the process.
    base, near_stride = 1 << 31, 64
    try:
        memory = torch.empty(base + 16 * far_stride, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("the system does not reserve 9 GiB that are not used")

    def reserve(tensor, place):
        B, heads, length, dims = tensor.shape
        near = 2048 if far == "rows" else near_stride
        steps = (far_stride, near_stride) if far == "rows" else (near, far_stride)
        view = memory.as_strided((B, heads, length, dims), (0, 32, *steps), base + place)
        return view.copy_(tensor)

    t = operands(function, M, N, "all", D=D, V=D)
    t |= {name: t[name].half() for name in ("query", "key", "value")}
    direction = torch.randn(1, 2, M, D).half()
    expected = run(function, t, direction)
    places = {"query": 0, "key": 8, "value": 16}
    t |= {name: reserve(t[name], place) for name, place in places.items()}
    assert_same_bits(run(function, t, reserve(direction, 24)), expected)
    assert launches["decode"] == (2 if M == 2 else 0)
