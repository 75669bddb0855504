"""The specification itself: values computed by hand, and identities that the papers state."""

import math

import hypothesis.strategies as st
import oracles
import pytest
import torch
from hypothesis import given

from hf_sigmoid import reference

FUNCTIONS = {"sigmoid": reference.sigmoid_attention, "ssmax": reference.ssmax_attention}


def by_hand(values):
    return torch.tensor(values, dtype=torch.float64)[None, None]


def test_two_keys_by_hand():
    q, k = by_hand([[2.0]]), by_hand([[0.0], [math.log(3) / 2]])  # logits 0 and log 3 with τ = 1
    v = by_hand([[10.0], [1.0]])
    sigmoid, weights = reference.sigmoid_attention(q, k, v, scaling=1.0)
    torch.testing.assert_close(weights, by_hand([[0.5, 0.75]]))
    torch.testing.assert_close(sigmoid, by_hand([[5.75]]))
    shifted, _ = reference.sigmoid_attention(q, k, v, scaling=1.0, bias=-math.log(3))
    torch.testing.assert_close(shifted, by_hand([[2.5 + 0.5]]))
    ssmax, weights = reference.ssmax_attention(q, k, v, scaling=1.0, multiplier=2.0)
    torch.testing.assert_close(weights, by_hand([[0.1, 0.9]]))  # 1 : 3²
    torch.testing.assert_close(ssmax, by_hand([[1.9]]))


def test_order_of_the_terms_by_hand():
    """Soft cap, then ALiBi and bias, then ssmax multiplies all of it and no sink."""
    q, k, v = by_hand([[1.0]]), by_hand([[0.0], [3.0]]), by_hand([[1.0], [0.0]])
    options = {"scaling": 1.0, "softcap": 2.0, "alibi_slopes": torch.tensor([0.5]).double()}
    options["logit_bias"] = by_hand([[0.25, 0.0]])
    z = [-0.5 * 1 + 0.25, 2 * math.tanh(1.5)]  # one query, two keys: it stands at key 1
    sigmoid, _ = reference.sigmoid_attention(q, k, v, bias=0.1, **options)
    torch.testing.assert_close(sigmoid, by_hand([[1 / (1 + math.exp(-z[0] - 0.1))]]))
    sinks = torch.tensor([0.7]).double()
    ssmax, _ = reference.ssmax_attention(q, k, v, multiplier=3.0, sinks=sinks, **options)
    terms = [math.exp(3 * z[0]), math.exp(3 * z[1]), math.exp(0.7)]
    torch.testing.assert_close(ssmax, by_hand([[terms[0] / sum(terms)]]))


@given(problem=oracles.problems(function="ssmax", dtypes=(torch.float64,), features=False))
def test_softmax_is_sigmoid_with_the_leave_one_out_log_sum_exp(problem):
    """softmax_n = σ(z_n − log Σ_{j≠n} exp z_j), exactly (the identity that conversion rests on)."""
    options = {
        name: problem.options[name] for name in ("visible", "is_causal") if name in problem.options
    }
    qkv = [problem.tensors[name] for name in ("query", "key", "value")]
    _, weights = reference.ssmax_attention(*qkv, **options)
    N = weights.shape[-1]
    z, hidden, _ = reference.logits_of(
        *qkv, None, options.get("visible"), options.get("is_causal", False), None, None, None, True
    )
    z = z.masked_fill(hidden, -torch.inf)
    others = (
        z.unsqueeze(-2).expand(*z.shape[:-1], N, N).masked_fill(torch.eye(N).bool(), -torch.inf)
    )
    expected = torch.sigmoid(z - torch.logsumexp(others, -1)).masked_fill(hidden, 0.0)
    alone = (~hidden).sum(-1, keepdim=True) == 1  # −inf − (−inf): a single key has weight 1
    expected = torch.where(alone & ~hidden, 1.0, expected)
    torch.testing.assert_close(weights, expected)


@given(N=st.integers(2, 200), scale=st.floats(0.05, 0.5))
def test_ssmax_keeps_the_largest_weight_when_the_row_grows(N, scale):
    """Nakanishi 2025, figure 1: one logit 3, all others −2; s log n holds the maximum."""
    q, k = by_hand([[1.0]]), by_hand([[3.0], *[[-2.0]] * (N - 1)])
    _, weights = reference.ssmax_attention(q, k, k, scaling=1.0, multiplier=scale * math.log(N))
    expected = 1 / (1 + (N - 1) * N ** (-5 * scale))
    assert weights[..., 0].item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_query_that_sees_nothing_gives_zero_and_no_gradient(function):
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 1, 5, 4, dtype=torch.float64)
    visible = torch.tensor([[[0, 5], [2, 2], [4, 1]]], dtype=torch.int32)
    output, _ = FUNCTIONS[function](q, k, k, visible=visible)
    assert (output[:, :, 1:] == 0).all() and (output[:, :, 0] != 0).any()
    output.sum().backward()
    assert (q.grad[:, :, 1:] == 0).all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_causal_is_lower_right(function):
    """With more keys the last query sees every key, with fewer the first queries see none."""
    q, k = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 5, 4)
    _, weights = FUNCTIONS[function](q, k, k, is_causal=True)
    assert ((weights > 0).sum(-1) == torch.tensor([4, 5])).all()
    _, weights = FUNCTIONS[function](k, q, q, is_causal=True)
    assert ((weights > 0).sum(-1) == torch.tensor([0, 0, 0, 1, 2])).all()
