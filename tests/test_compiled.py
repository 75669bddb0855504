"""The compiled forward pass of a CPU, against the reference in float64."""

import math
import subprocess
import sys

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_sigmoid import compiled, cpu, functional

needs_compiler = pytest.mark.skipif(
    compiled.library() is None, reason="this machine has no C compiler, or PyTorch no MKL"
)
FUNCTIONS = pytest.mark.parametrize("function", ["sigmoid", "ssmax"])
DTYPES = (torch.float32, torch.bfloat16)
REST = (None, None, None, None)


@pytest.fixture
def calls(monkeypatch):
    """What the compiled function has been called with."""
    seen, forward = [], compiled.forward
    monkeypatch.setattr(compiled, "forward", lambda *args: seen.append(args) or forward(*args))
    return seen


def attend(function, q, k, v, row, intervals):
    return cpu.attention(q, k, v, row, intervals, *REST, function, 0.3, 0.0, 0.0, 0, False)[0]


def problem(function, M, N, dtype=torch.float32, B=1, H=4, G=2, D=16, V=24):
    q, k, v = torch.randn(B, H, M, D), torch.randn(B, G, N, D), torch.randn(B, G, N, V)
    hi = (torch.arange(M) + 1 + N - M).clamp(0, N)
    intervals = torch.stack([0 * hi, hi], -1).int().expand(B, M, 2)
    return *(x.to(dtype) for x in (q, k, v)), torch.randn(B, H, M), intervals


@needs_compiler
@settings(max_examples=150)
@given(
    oracles.problems(dtypes=DTYPES, longest=90, features=False, few_queries=True),
    st.sampled_from([1, 2]),
)
def test_output_is_as_exact_as_plain_pytorch(problem, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        verb = getattr(functional, f"{problem.function}_attention")
        oracles.check_call(problem, verb, gradients=False, backend="torch")
    finally:
        torch.set_num_threads(before)


@needs_compiler
@FUNCTIONS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "N"), [(1, 1300), (70, 1300), (130, 130), (600, 40)], ids=str)
def test_several_tiles_in_each_direction(calls, function, dtype, M, N):
    generator = torch.Generator().manual_seed(1)
    case = oracles.make(function, dtype, 2, 2, 2, M, N, 20, 33, "causal", set(), "full", generator)
    verb = getattr(functional, f"{function}_attention")
    if function == "sigmoid" or dtype == torch.bfloat16:
        oracles.check_call(case, verb, gradients=False, backend="torch")
        assert calls


@needs_compiler
@FUNCTIONS
def test_calls_that_need_more_take_the_other_path(calls, function):
    q, k, v, row, intervals = problem(function, 10, 20)
    with torch.no_grad():
        attend(function, q, k, v, row, intervals)
        assert len(calls) == 1
        attend(function, q, k, v.mT.contiguous().mT, row, intervals)
        mask = torch.ones(1, 4, 10, 20, dtype=torch.bool)
        options = (function, 0.3, 0.0, 0.0, 0)
        cpu.attention(q, k, v, row, intervals, mask, None, None, None, *options, False)
        cpu.attention(q, k, v, row, intervals, *REST, *options, True)
        attend(function, *(x.half() for x in (q, k, v)), row, intervals)
        attend(function, *(x.double() for x in (q, k, v, row)), intervals)
    attend(function, q.requires_grad_(), k, v, row, intervals)
    assert len(calls) == 1


@needs_compiler
@FUNCTIONS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_and_unused_memory_do_not_matter(calls, function, dtype):
    q, k, v, row, intervals = problem(function, 18, 40, dtype, B=2)
    intervals = torch.stack([intervals[..., 0] + 3, (intervals[..., 1] - 4).clamp(min=3)], -1)
    expected = attend(function, q, k, v, row, intervals)
    others = []
    for x in (q, k, v):
        around = torch.full((2, 40, x.shape[1], x.shape[3] + 5), math.nan, dtype=dtype)
        inner = around[:, : x.shape[2], :, 2 : 2 + x.shape[3]].transpose(1, 2)
        inner.copy_(x)
        others.append(inner)
    for x in others[1:]:
        x[:, :, :3] = x[:, :, 36:] = math.nan
    assert torch.equal(attend(function, *others, row, intervals), expected)
    assert len(calls) == 2


@needs_compiler
def test_log_sum_exp_is_of_the_logits(calls):
    q, k, v, row, intervals = problem("ssmax", 70, 90)
    intervals = intervals.clone()
    intervals[:, 3] = 0
    found = cpu.attention(q, k, v, row, intervals, *REST, "ssmax", 0.3, 0.0, 0.0, 0, False)[1]
    z = 0.3 * q.double() @ k.double().repeat_interleave(2, 1).mT * row.double()[..., None]
    columns = torch.arange(90)
    hidden = (columns < intervals[..., :1]) | (columns >= intervals[..., 1:])
    expected = z.masked_fill(hidden[:, None], -math.inf).logsumexp(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert calls


@needs_compiler
@FUNCTIONS
def test_rows_that_see_nothing_give_zeros(calls, function):
    for M, N in ((5, 0), (0, 5), (70, 20)):
        q, k, v, row, intervals = problem(function, M, N)
        output = attend(function, q, k, v, row, 0 * intervals)
        assert torch.equal(output, torch.zeros(1, 4, M, 24))
    assert len(calls) == 3


@needs_compiler
@pytest.mark.parametrize("bias", [-1e4, -200.0, -88.0, 88.0, 200.0, 1e4])
def test_extreme_logits_saturate(calls, bias):
    q, k, v, row, intervals = problem("sigmoid", 20, 20)
    output = attend("sigmoid", q, k, v, torch.full_like(row, bias), intervals)
    weight = 1.0 if bias > 0 else 0.0
    expected = weight * v.cumsum(2).repeat_interleave(2, 1)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-4)
    assert calls


@needs_compiler
@FUNCTIONS
def test_what_is_not_a_number_stays_so(calls, function):
    for place in range(4):
        tensors = [x.clone() for x in problem(function, 20, 20)]
        tensors[place].view(-1)[0] = math.nan
        output = attend(function, *tensors)
        assert output[0, 0, 0].isnan().all() if place != 2 else output[0, 0, 0, 0].isnan()
    assert len(calls) == 4


@FUNCTIONS
@pytest.mark.parametrize("how", ["no compiler", "compiler fails", "refused"])
def test_without_a_compiler_the_result_is_the_same(tmp_path, function, how):
    """In a process of its own, whose cache of compiled files is empty."""
    code = f"""
import torch
from hf_sigmoid import compiled, functional
assert compiled.library() is None
q = torch.ones(1, 1, 4, 8)
print(functional.{function}_attention(q, q, q, is_causal=True).sum().item())
"""
    environment = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    if how == "compiler fails":
        environment["CC"] = "/bin/false"
    if how == "refused":
        environment = {"HF_SIGMOID_COMPILE": "0", "XDG_CACHE_HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    weight = 1 / (1 + math.exp(-(8**0.5)))
    expected = 8 * (weight * 10 if function == "sigmoid" else 4)
    assert math.isclose(float(run.stdout), expected, rel_tol=1e-5)
    assert not list(tmp_path.iterdir())
