"""The torch backend (blocked, and scaled_dot_product_attention for ssmax) against float64."""

import subprocess
import sys

import oracles
import pytest
import torch
from hypothesis import given, settings

from hf_sigmoid import cpu, functional, reference


@given(problem=oracles.problems())
@settings(max_examples=150)
def test_torch_backend_is_right(problem):
    oracles.check(problem, "torch")


@given(problem=oracles.problems())
@settings(max_examples=100)
def test_small_blocks_change_nothing(problem):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "BLOCK_ELEMENTS", 100)
        patch.setattr(cpu, "LEAST_ROWS", 1)
        patch.setattr(functional, "DENSE_MASK_ELEMENTS", 0)
        oracles.check(problem, "torch")


@given(problem=oracles.problems(dtypes=(torch.float32, torch.float16, torch.float64)))
@settings(max_examples=60)
def test_reference_in_the_inputs_dtype_is_right(problem):
    oracles.check(problem, "reference")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["none", "dense"])
def test_ssmax_in_16_bits_does_not_round_its_logits(dtype, mask):
    for problem in oracles.sharp(dtype, mask):
        oracles.check(problem, "torch")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "dense"])
def test_the_gradient_of_a_multiplier_of_1_is_as_exact_as_any(dtype, mask):
    """Where ssmax begins to learn; a kernel on c·q alone would round it."""
    generator = torch.Generator().manual_seed(4)
    problem = oracles.make(
        "ssmax", dtype, 2, 2, 2, 48, 48, 32, 32, mask, set(), "full", generator, 4.0
    )
    problem.tensors["multiplier"] = torch.ones_like(problem.tensors["multiplier"])
    exact, own, given = (
        problem.solve(call, kind)["dmultiplier"]
        for call, kind in (
            (reference.ssmax_attention, torch.float64),
            (reference.ssmax_attention, dtype),
            (functional.ssmax_attention, dtype),
        )
    )
    assert (given - exact).norm() <= 2 * (own - exact).norm() + 1e-4 * exact.norm()


@pytest.mark.parametrize("function", ["sigmoid", "ssmax"])
def test_gradients_agree_with_finite_differences(function):
    generator = torch.Generator().manual_seed(1)
    extras = {"softcap", "alibi_slopes", "logit_bias", "sinks"}
    problem = oracles.make(
        function, torch.float64, 1, 1, 2, 3, 4, 2, 3, "dense_causal", extras, "full", generator
    )
    verb = getattr(functional, f"{function}_attention")
    names, leaves = zip(*problem.tensors.items(), strict=True)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]

    def call(*leaves):
        return verb(**dict(zip(names, leaves, strict=True)), **problem.options, backend="torch")

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("function", ["sigmoid", "ssmax"])
def test_operator_has_a_right_schema_fake_and_autograd(function):
    generator = torch.Generator().manual_seed(1)
    problem = oracles.make(
        function,
        torch.float32,
        2,
        1,
        2,
        5,
        7,
        4,
        3,
        "dense",
        {"alibi_slopes", "logit_bias"},
        "full",
        generator,
    )
    t = {name: tensor.float().requires_grad_() for name, tensor in problem.tensors.items()}
    row = t["bias" if function == "sigmoid" else "multiplier"]
    B, H, M, N = 2, 2, 5, 7
    intervals = torch.tensor([0, N], dtype=torch.int32).expand(B, M, 2)
    mask = problem.options["visible"].expand(B, H, M, N)
    slopes = t["alibi_slopes"].expand(B, H)
    arguments = (
        t["query"], t["key"], t["value"], row, intervals, mask,
        t["logit_bias"].expand(B, H, M, N), slopes, None, function, 0.5, 3.0, 0.0, 0, True,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.hf_sigmoid.blocked_forward.default, arguments)


@pytest.mark.parametrize("function", ["sigmoid", "ssmax"])
def test_compiles_to_one_graph(function):
    verb = getattr(functional, f"{function}_attention")
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    window = (
        torch.stack([(torch.arange(6) - 2).clamp(0), torch.arange(6) + 1], -1).expand(2, 6, 2).int()
    )

    def call(q, k, v):
        return verb(q, k, v, visible=window, softcap=5.0).sum()

    grads = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        run(*leaves).backward()
        grads.append([leaf.grad for leaf in leaves])
    for eager, compiled in zip(*grads, strict=True):
        torch.testing.assert_close(eager, compiled)


@pytest.mark.parametrize("function", ["sigmoid", "ssmax"])
def test_dropout_keeps_the_mean_and_its_gradient_follows_the_same_mask(function):
    torch.manual_seed(3)
    verb = getattr(functional, f"{function}_attention")
    q, k = torch.randn(1, 1, 64, 8), torch.randn(1, 1, 64, 8)
    # One value column of ones: the output is the row's sum of kept weights.
    v = torch.ones(1, 1, 64, 1, requires_grad=True)
    options = {"softcap": 50.0, "dropout": 0.25}
    output = verb(q, k, v, **options)
    output.sum().backward()
    # Linear in v: the output's sum is the gradient's, only if both passes drop the same weights.
    torch.testing.assert_close(v.grad.sum(), output.sum())
    plain = verb(q, k, v, softcap=50.0)
    assert not torch.equal(output, plain)
    assert abs(output.mean() / plain.mean() - 1) < 0.05


MEMORY = """
import resource, torch
torch.set_num_threads(2)
from hf_sigmoid import functional
M, H, G, D = 16384, 9, 3, 64
q, k, v = (torch.randn(1, heads, M, D) for heads in (H, G, G))
lengths = torch.arange(1, M + 1)
small = q[:, :, :256]
call = getattr(functional, "{function}_attention")
call(small, k[:, :, :256], v[:, :, :256], is_causal=True, softcap=30.0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
window = torch.stack([(lengths - 16000).clamp(0), lengths], -1).int()[None]
with torch.no_grad():
    call(q, k, v, visible=window)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("function", ["sigmoid", "ssmax"])
def test_16k_tokens_need_no_matrix_of_weights(function):
    # One layer of SmolLM2's shape. A single head's M×N float32 matrix would be 1024 MiB, a bool one
    # 256.
    run = subprocess.run(
        [sys.executable, "-c", MEMORY.format(function=function)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 256, f"{run.stdout} MiB"
