"""Random problems, and the one oracle: the reference in float64, with an error budget that is
computed.

An implementation may err at most twice as much as plain PyTorch errs that computes in float32 on
the same inputs, in 16 bits too, plus one rounding of the weights and of the result in the inputs'
dtype.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from hf_sigmoid import functional, reference

MANY = 1000  # outputs whose errors have a typical size
MASKS = ("none", "causal", "window", "intervals", "dense", "dense_causal")


@dataclass
class Problem:
    """The arguments of one call, all float64, and the dtype in which it is to be solved."""

    function: str
    dtype: torch.dtype
    tensors: dict[str, Tensor]  # differentiable
    options: dict = field(default_factory=dict)
    direction: Tensor = None  # what the output is multiplied with to get a scalar

    def solve(self, call, dtype: torch.dtype, device="cpu", **options) -> dict[str, Tensor]:
        """Output and gradients of `call` in `dtype` on `device`, as float64 on the CPU."""
        leaves = {}
        for name, tensor in self.tensors.items():
            # Only q, k and v are rounded: parameters and per-query terms are float32 in any model.
            kind = (
                dtype
                if name in ("query", "key", "value")
                else torch.promote_types(dtype, torch.float32)
            )
            rounded = tensor.to(self.dtype if name in ("query", "key", "value") else kind)
            leaves[name] = rounded.to(kind).clone().to(device).requires_grad_()
        given = {
            name: option.to(device) if isinstance(option, Tensor) else option
            for name, option in self.options.items()
        }
        output = call(**leaves, **given, **options)
        output = output[0] if isinstance(output, tuple) else output
        (output.double() * self.direction.to(device)).sum().backward()
        results = {f"d{name}": leaf.grad.double().cpu() for name, leaf in leaves.items()}
        return {"output": output.detach().double().cpu(), **results}


def check(problem: Problem, backend: str, **options) -> None:
    """Assert that a backend of the public verbs solves the problem within the budget."""
    verb = getattr(functional, f"{problem.function}_attention")
    check_call(problem, verb, backend=backend, **options)


def check_call(problem: Problem, call, **options) -> None:
    """Assert that `call` solves the problem within the budget."""
    plain = getattr(reference, f"{problem.function}_attention")
    exact = problem.solve(plain, torch.float64)
    yardstick = problem.solve(plain, problem.dtype)
    given = problem.solve(call, problem.dtype, **options)
    bounds, first_order = magnitudes(problem, amplified=False), magnitudes(problem, amplified=True)
    eps, eps_of_sums = (
        torch.finfo(dtype).eps
        for dtype in (problem.dtype, torch.promote_types(problem.dtype, torch.float32))
    )
    for name, expected in exact.items():
        assert given[name].shape == expected.shape, name
        assert given[name].isfinite().all(), f"{name} is not finite"
        error = (given[name] - expected).abs().max().item()
        own = (yardstick[name] - expected).abs().max().item()
        budget = 2 * own + eps * bounds[name] + 4 * eps_of_sums * first_order[name]
        assert error <= budget, f"{name}: error {error:.3g}, budget {budget:.3g}"
    if problem.dtype.itemsize == 2 and exact["output"].numel() >= MANY:
        check_typical_error(problem, exact["output"], yardstick["output"], given["output"])


def check_typical_error(problem: Problem, exact: Tensor, own: Tensor, given: Tensor) -> None:
    """Assert a budget for the error's norm, where the largest error of many hides a systematic one.

    Roundings are independent: that of N weights moves an output by about ε/8 of (Σ p² v²)^½. A
    logit that was rounded to 16 bits, as c·q is before some softmax kernels, costs more.
    """
    weights = getattr(reference, f"{problem.function}_attention")(
        **problem.tensors, **problem.options
    )[1]
    value = problem.tensors["value"]
    value = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
    spread = (weights.square() @ value.square()).sqrt().norm().item()
    error, plain = (given - exact).norm().item(), (own - exact).norm().item()
    # float16 has no small numbers: weights below 2⁻²⁴ are lost.
    lost = torch.finfo(problem.dtype).smallest_normal * torch.finfo(problem.dtype).eps
    lost *= value.abs().sum(2).norm().item() * exact.shape[2] ** 0.5
    budget = 2 * plain + torch.finfo(problem.dtype).eps / 8 * spread + lost
    assert error <= budget, f"output: norm of the error {error:.3g}, budget {budget:.3g}"


def magnitudes(problem: Problem, amplified: bool) -> dict[str, float]:
    """Largest sum of absolute terms behind each result: what one rounding of its terms can move it
    by.

    A gradient may be the difference of large terms, even exactly 0, so its own size says nothing
    about its rounding error. `amplified` also counts how a rounded logit moves its weight, e^x by
    x·ε.
    """
    t, options = problem.tensors, problem.options
    plain = getattr(reference, f"{problem.function}_attention")
    weights = plain(**t, **options)[1]
    B, H, M, N = weights.shape
    q, do = t["query"].abs(), problem.direction.abs()
    k, v = (t[name].abs().repeat_interleave(H // t[name].shape[1], 1) for name in ("key", "value"))
    scale = q.shape[-1] ** -0.5
    distance = (torch.arange(M)[:, None] + N - M - torch.arange(N)).abs()

    z = scale * q @ k.transpose(2, 3)
    if "softcap" in options:
        z = z.clamp(max=options["softcap"])
    if "alibi_slopes" in t:
        z = z + t["alibi_slopes"].view(1, H, 1, 1) * distance
    if "logit_bias" in t:
        z = z + t["logit_bias"].masked_fill(t["logit_bias"] == -torch.inf, 0.0).abs()
    name = "bias" if problem.function == "sigmoid" else "multiplier"
    row = t.get(
        name, torch.tensor(options.get(name), dtype=torch.float64) if name in options else None
    )
    row = row.abs().expand(B, H, M).unsqueeze(-1)
    x = z + row if problem.function == "sigmoid" else z * row
    if amplified:
        weights = weights * (
            1 + x + (0 if problem.function == "sigmoid" else x.amax(-1, keepdim=True))
        )
    reach = do @ v.transpose(2, 3)
    dx, dz = weights * reach, weights * reach
    if problem.function == "ssmax":
        dx = weights * (reach + (weights * reach).sum(-1, keepdim=True))
        dz = dx * row

    def grouped(tensor):
        G = t["key"].shape[1]
        return tensor.view(B, G, H // G, N, -1).sum(2)

    bounds = {
        "output": weights @ v,
        "dquery": scale * dz @ k,
        "dkey": grouped(scale * dz.transpose(2, 3) @ q),
        "dvalue": grouped(weights.transpose(2, 3) @ do),
        "dlogit_bias": dz.sum_to_size(t["logit_bias"].shape) if "logit_bias" in t else dz,
        "dalibi_slopes": (dz * distance).sum((0, 2, 3)),
        "dsinks": (weights * reach).sum((0, 2, 3)),
    }
    drow = (dx if problem.function == "sigmoid" else dx * z).sum(-1)
    given = t.get(name)
    bounds[f"d{name}"] = drow.sum((0, 2)) if given is not None and given.shape[0] < B else drow
    if given is not None and given.shape[-1] == 1:
        bounds[f"d{name}"] = drow.sum((0, 2))
    return {name: bound.max().item() for name, bound in bounds.items()}


def sharp(dtype: torch.dtype, mask: str) -> Iterator[Problem]:
    """ssmax problems with large logits: c·q in `dtype` rounds them, or is more than it can hold."""
    for multiplier, sharpness in itertools.product((1.7, 9.0), (16.0, 2700.0)):
        generator = torch.Generator().manual_seed(3)
        problem = make(
            "ssmax", dtype, 1, 2, 2, 40, 40, 16, 33, mask, set(), "number", generator, sharpness
        )
        problem.tensors["key"] *= 16 / sharpness
        problem.options["multiplier"] = multiplier
        yield problem


@st.composite
def problems(
    draw, function=None, dtypes=(torch.float32, torch.bfloat16), longest=40, features=True,
    few_queries=False,
):  # fmt: skip
    """A random problem: sizes, heads, dtype, mask, and each optional argument present or not."""
    function = function or draw(st.sampled_from(["sigmoid", "ssmax"]))
    dtype = draw(st.sampled_from(dtypes))
    B, G, R = draw(st.sampled_from(HEADS))
    M, N = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    if few_queries and draw(st.booleans()):
        M, N = 1 + M % 6, 3 * N
    D, V = draw(st.sampled_from([4, 8, 20, 33])), draw(st.sampled_from([4, 8, 20, 33]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = draw(st.sampled_from(MASKS))
    extras = (
        draw(st.sets(st.sampled_from(["softcap", "alibi_slopes", "logit_bias", "sinks"])))
        if features
        else set()
    )
    return make(
        function, dtype, B, G, R, M, N, D, V, mask, extras, draw(st.sampled_from(ROWS)), generator,
        draw(st.sampled_from(SHARPNESS)),
    )  # fmt: skip


# Batch, key heads, query heads of a key head: every kind, and few enough to be quick.
HEADS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 3), (1, 2, 2), (2, 1, 2), (2, 2, 1))
ROWS = ("number", "head", "full")
SHARPNESS = (1.0, 16.0)  # of the queries: rounding a logit shows where logits are large


def make(
    function, dtype, B, G, R, M, N, D, V, mask, extras, row, generator, sharpness=1.0
) -> Problem:  # fmt: skip
    """One problem; see `problems` for the ranges."""
    H = G * R

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query = normal(B, H, M, D) * sharpness
    tensors = {"query": query, "key": normal(B, G, N, D), "value": normal(B, G, N, V)}
    options = {}
    name, centre = ("bias", -2.0) if function == "sigmoid" else ("multiplier", 1.0)
    if row == "number":
        options[name] = centre
    else:
        shape = (B, H, M) if row == "full" else (1, H, 1)
        tensors[name] = centre + 0.7 * normal(*shape)
    if "softcap" in extras:
        options["softcap"] = 2.0
    if "alibi_slopes" in extras:
        tensors["alibi_slopes"] = 0.1 * normal(H).abs()
    if "logit_bias" in extras:
        shapes = ((1, H, M, N), (B, H, M, N), (1, 1, M, N), (B, 1, 1, N), (1, H, M, 1))
        bias = normal(*shapes[torch.randint(len(shapes), (), generator=generator)])
        hides = torch.rand(bias.shape, generator=generator) < 0.2
        tensors["logit_bias"] = bias.masked_fill(hides, -torch.inf)
    if "sinks" in extras and function == "ssmax":
        tensors["sinks"] = normal(H)

    if mask in ("causal", "dense_causal"):
        options["is_causal"] = True
    if mask == "window":
        hi = torch.arange(M) + 1 + N - M
        options["visible"] = torch.stack([hi - 5, hi], -1).clamp(0, N).expand(B, M, 2).int()
    elif mask == "intervals":
        ends = torch.randint(0, N + 1, (B, 1, M, 2), generator=generator).sort(-1).values
        options["visible"] = ends.int()
    elif mask.startswith("dense"):
        options["visible"] = torch.rand(B, 1, M, N, generator=generator) < 0.5
    return Problem(function, dtype, tensors, options, normal(B, H, M, V))
