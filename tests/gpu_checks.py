"""What must hold of the kernels on a GPU: checks by name, in an order that may be cut anywhere.

tests/test_gpu.py runs them all under pytest. `make gpu`, which may find no pytest, runs them in
the order of `ordered` for as long as it has: first every pair of a function, a dtype, head dims, a
mask, terms and a shape (`exact`), then one of each other kind, then what is left, shuffled.

With device "cpu", in the interpreter or on the stub driver, what only a GPU can do is left out.
"""

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterator
from functools import partial

import oracles
import torch

from hf_sigmoid import functional, reference

FUNCTIONS = ("sigmoid", "ssmax")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DIMS = {"64": (64, 64), "128": (128, 128), "96/40": (96, 40), "256": (256, 256)}
EVERY = ("softcap", "alibi_slopes", "logit_bias", "sinks")
TERMS = {"plain": (), **{name: (name,) for name in EVERY}, "every_term": EVERY}
# M, N, query heads of a key head. Neither length is a multiple of a tile; the long ones have loops
# over full tiles, which delay products.
SHAPES = {
    "prefill": (300, 333, 2),
    "long": (1111, 1111, 2),
    "more_keys": (1025, 2047, 2),
    "decode": (1, 4099, 8),
    "few_queries": (7, 4099, 4),
    "split_many": (64, 4099, 2),
}
FACTORS = (FUNCTIONS, DTYPES, DIMS, oracles.MASKS, TERMS, SHAPES)


def make(function, dtype, M, N, mask="none", terms=(), B=1, G=2, R=2, dims=(64, 64), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return oracles.make(
        function, dtype, B, G, R, M, N, *dims, mask, set(terms), "full", generator
    )  # fmt: skip


def on_device(problem: oracles.Problem, device: str) -> dict:
    """The keyword arguments of the problem's verb, in its dtype."""
    tensors = {
        name: t.to(problem.dtype if name in ("query", "key", "value") else torch.float32)
        for name, t in problem.tensors.items()
    }
    given = {**tensors, **problem.options, "backend": "triton"}
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }


def verb(function: str) -> Callable:
    return getattr(functional, f"{function}_attention")


def exact(function, dtype, dims, mask, terms, shape, device) -> None:
    """Output and every gradient within the budget of plain PyTorch."""
    M, N, R = SHAPES[shape]
    B = 2 if shape == "prefill" else 1
    problem = make(function, DTYPES[dtype], M, N, mask, TERMS[terms], B, 2, R, DIMS[dims])
    oracles.check(problem, "triton", device=device)


def descriptors(dtype, dims, layout, device) -> None:
    """Descriptors read what pointers read, on GPUs whose table asks for descriptors; elsewhere both
    calls take the pointers."""
    from hf_sigmoid.kernels.flash import forward

    given = on_device(make("sigmoid", dtype, 700, 1024, "causal", B=2, G=3, dims=dims), device)
    for name in ("key", "value"):
        tensor = given[name]
        if layout == "heads last":
            tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "part of a cache":
            tensor = torch.nn.functional.pad(tensor, (0, 0, 5, 9), value=float("nan"))[:, :, 5:-9]
        given[name] = tensor
    described = verb("sigmoid")(**given)
    describable = forward.is_describable
    forward.is_describable = lambda tensor: False
    try:
        pointed = verb("sigmoid")(**given)
    finally:
        forward.is_describable = describable
    torch.testing.assert_close(described, pointed, rtol=2**-7, atol=1e-6)


def statistics(function, dtype, mask, M, N, terms, device) -> None:
    """Statistics are right, and asking for them changes no bit of the output."""
    given = on_device(make(function, dtype, M, N, mask, terms), device)
    plain = verb(function)(**given)
    output, found = verb(function)(**given, return_statistics=True)
    assert torch.equal(output, plain)
    # In float64, of the inputs as rounded to the dtype.
    wide = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in given.items()
    }  # fmt: skip
    _, expected = verb(function)(**{**wide, "backend": "torch"}, return_statistics=True)
    # Products of the inputs are summed in float32; sums of weights by the form of σ.
    size = expected.max_logit[expected.max_logit.isfinite()].abs().max().item()
    eps = torch.finfo(torch.float32).eps
    tolerance = {"rtol": 64 * eps * (1 + size) + 2.0**-12, "atol": 64 * eps * (1 + size)}
    torch.testing.assert_close(found.max_logit.double(), expected.max_logit, **tolerance)
    torch.testing.assert_close(found.weight_sum.double(), expected.weight_sum, **tolerance)


def repeats(function, dtype, M, N, terms, device) -> None:
    """Two runs give the same bits."""
    problem = make(function, dtype, M, N, "causal", terms)
    given = on_device(problem, device)
    names = list(problem.tensors)
    results = []
    for _ in range(2):
        leaves = [given[name].detach().requires_grad_() for name in names]
        call = {**given, **dict(zip(names, leaves, strict=True)), "return_statistics": True}
        output, found = verb(function)(**call)
        gradients = torch.autograd.grad(output.float().square().sum(), leaves)
        results.append((output, *found, *gradients))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def graph(function, M, N, differentiates, mask, device) -> None:
    """Replayed on other tensors, intervals included, a captured graph equals a call on them."""
    first, second = (make(function, torch.bfloat16, M, N, mask, seed=seed) for seed in (0, 1))
    names = list(first.tensors)
    inputs = on_device(first, device)
    leaves = [inputs[name].requires_grad_(differentiates) for name in names]

    def call():
        output, found = verb(function)(**inputs, return_statistics=True)
        gradients = ()
        if differentiates:
            gradients = torch.autograd.grad(output.float().square().sum(), leaves)
        return output.detach(), *found, *gradients

    if device == "cpu":
        call()
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    captured_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured_graph):
        captured = call()
    for source in (second, first):
        with torch.no_grad():
            for name, value in on_device(source, device).items():
                if isinstance(value, torch.Tensor):
                    inputs[name].copy_(value)
        captured_graph.replay()
        for replayed, expected in zip(captured, call(), strict=True):
            assert torch.equal(replayed, expected)


def dropout(function, every_term, device) -> None:
    """The output and every gradient are those of one mask of kept weights, times 1/(1 − rate)."""
    rate, seed, B, H, G, M, N = 0.3, 77, 2, 4, 2, 33, 45
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    q, k, v, direction = (
        normal(B, heads, length, dim)
        for heads, length, dim in ((H, M, 8), (G, N, 8), (G, N, 12), (H, M, 12))
    )
    row, rows, columns = normal(B, H, M), torch.arange(M)[:, None], torch.arange(N)
    options = {"visible": (columns <= rows + N - M).expand(B, 1, M, N).to(device), "scaling": 0.3}
    terms = {"bias" if function == "sigmoid" else "multiplier": row}
    if every_term:
        mask = (torch.rand(B, 1, M, N, generator=generator) < 0.7).to(device)
        options |= {"visible": options["visible"] & mask, "softcap": 2.0}
        terms |= {"logit_bias": normal(1, H, M, N), "alibi_slopes": normal(H).abs()}
        if function == "ssmax":
            terms["sinks"] = normal(H)

    def drop(values):
        torch.manual_seed(seed)  # of which the call draws the seed of its mask
        return verb(function)(q, k, values, **terms, **options, dropout=rate, backend="triton")

    # Which weights are kept, read through values that are a unit matrix.
    weights = getattr(reference, f"{function}_attention")(q, k, v, **terms, **options)[1]
    through = drop(torch.eye(N, device=device).expand(B, G, N, N))
    seen = weights > 1e-6
    kept = (through > 0) | ~seen
    torch.testing.assert_close(through, weights * kept / (1 - rate), rtol=1e-4, atol=1e-5)
    share, count = (kept & seen).sum() / seen.sum(), seen.sum()
    assert abs(share - (1 - rate)) < 4 * (rate * (1 - rate) / count) ** 0.5

    leaves = [q, k, v, *terms.values()]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    output = drop(v)
    found = torch.autograd.grad(output, leaves, direction)
    weights = getattr(reference, f"{function}_attention")(q, k, v, **terms, **options)[1]
    right = (weights * kept / (1 - rate)) @ v.repeat_interleave(H // G, 1)
    expected = torch.autograd.grad(right, leaves, direction)
    for one, other in zip((output, *found), (right, *expected), strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


def relative_error_of_weights(dtype, n, device, M=64, keys=64) -> float:
    """Largest relative error of σ(z − log n), read through values that are a unit matrix."""
    generator = torch.Generator().manual_seed(2)
    q, k = (
        torch.randn(1, 1, length, 64, generator=generator).to(dtype).to(device)
        for length in (M, keys)
    )
    v = torch.eye(keys, device=device, dtype=dtype)[None, None]
    weights = functional.sigmoid_attention(q, k, v, bias=-math.log(n), backend="triton")
    z = q.double() @ k.double().mT * 64**-0.5
    right = torch.sigmoid(z - math.log(n))
    return ((weights.double() - right).abs() / right).max().item()


def small_weights(dtype, log2_n, device) -> None:
    """What a form of σ with an absolute error, like tanh.approx, loses at long contexts."""
    eps = torch.finfo(dtype).eps
    # Weights are rounded before they meet the values, and the output after. float16 keeps them
    # to 2^-25, as subnormal numbers below 2^-14.
    smallest = 2.0**-log2_n * math.exp(-6)
    subnormal = 2.0**-24 / smallest if dtype == torch.float16 else 0.0
    # Halley's cubic step leaves 2^-12.8; other forms round an argument near −60: 2^-19.
    form = 2.0**-12 if dtype != torch.float32 else 64 * eps
    assert relative_error_of_weights(dtype, 2**log2_n, device) <= eps + subnormal + form


def pairwise(factors: tuple) -> Iterator[tuple]:
    """Rows that hold every pair of values of two factors, the same few on every machine."""
    columns = list(itertools.combinations(range(len(factors)), 2))
    wanted = {
        (i, a, j, b): None for i, j in columns for a in factors[i] for b in factors[j]
    }  # a dict, for its order
    while wanted:
        i, a, j, b = next(iter(wanted))
        row = {i: a, j: b}
        for column in range(len(factors)):
            if column not in row:
                gains = [
                    len(_pairs(row | {column: value}) & wanted.keys()) for value in factors[column]
                ]
                row[column] = factors[column][gains.index(max(gains))]
        for pair in _pairs(row):
            wanted.pop(pair, None)
        yield tuple(row[column] for column in range(len(factors)))


def _pairs(row: dict) -> set:
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(sorted(row), 2)}


def ordered() -> dict[str, Callable]:
    """Every check by its name, to be called with the device."""
    checks, others = {}, {}
    for case in pairwise(tuple(tuple(each) for each in FACTORS)):
        checks[" ".join(("exact", *case))] = partial(exact, *case)
    for function, (M, N), mask in itertools.product(
        FUNCTIONS, ((300, 333), (3, 4099)), ("causal", "intervals")
    ):
        name = f"{function} {M}x{N} {mask}"
        for dtype in ("bf16", "fp32"):
            checks[f"statistics {dtype} {name}"] = partial(
                statistics, function, DTYPES[dtype], mask, M, N, ()
            )
        checks[f"graph {name}"] = partial(graph, function, M, N, M == 300, mask)
    for function, (M, N) in itertools.product(FUNCTIONS, ((1111, 1111), (3, 4099))):
        checks[f"repeats {function} {M}x{N}"] = partial(
            repeats, function, torch.bfloat16, M, N, EVERY
        )
    for function, every_term in itertools.product(FUNCTIONS, (False, True)):
        name = "every_term" if every_term else "plain"
        checks[f"dropout {function} {name}"] = partial(dropout, function, every_term)
    for layout in ("heads first", "heads last", "part of a cache"):
        checks[f"descriptors {layout}"] = partial(descriptors, torch.bfloat16, (128, 128), layout)
    for dtype, log2_n in itertools.product(DTYPES, (0, 11, 17)):
        checks[f"small_weights {dtype} n=2^{log2_n}"] = partial(
            small_weights, DTYPES[dtype], log2_n
        )
    for case in itertools.product(*FACTORS):
        others.setdefault(" ".join(("exact", *case)), partial(exact, *case))
    left = [name for name in others if name not in checks]
    random.Random(0).shuffle(left)
    return checks | {name: others[name] for name in left}


@contextlib.contextmanager
def launched_only() -> Iterator[None]:
    """Within it `oracles.check` calls the backend and compares nothing: see kernels/prewarm.py."""

    def launch(problem, backend, **options):
        problem.solve(verb(problem.function), problem.dtype, backend=backend, **options)

    check = oracles.check
    oracles.check = launch
    try:
        yield
    finally:
        oracles.check = check
