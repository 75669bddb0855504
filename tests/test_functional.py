"""Bad input to the two verbs: one error that names what was given and what was expected."""

from types import SimpleNamespace

import interpreter
import pytest
import torch
from largest import Largest

from hf_sigmoid import functional

interpreter.install()

VERBS = {"sigmoid": functional.sigmoid_attention, "ssmax": functional.ssmax_attention}
ROW = {"sigmoid": "bias", "ssmax": "multiplier"}
B, H, G, M, N, D, V = 2, 4, 2, 3, 5, 8, 6


def good(dtype=torch.float32):
    shapes = {"query": (B, H, M, D), "key": (B, G, N, D), "value": (B, G, N, V)}
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


BAD = {
    "three_dims": (
        {"query": torch.randn(H, M, D)},
        "query must be a float tensor of four dimensions, got",
    ),
    "integers": (
        {"key": torch.ones(B, G, N, D, dtype=torch.int64)},
        "key must be a float tensor.*int64",
    ),
    "batch": ({"key": torch.randn(3, G, N, D)}, "key must have query's batch 2, got 3"),
    "head_dim": ({"key": torch.randn(B, G, N, 7)}, "key must have query's head dim 8, got 7"),
    "key_heads": (
        {"value": torch.randn(B, 1, N, V)},
        r"key's heads and length \[2, 5\], got \[1, 5\]",
    ),
    "key_length": (
        {"value": torch.randn(B, G, 4, V)},
        r"key's heads and length \[2, 5\], got \[2, 4\]",
    ),
    "dtype": (
        {"value": torch.randn(B, G, N, V).half()},
        "value must have query's dtype torch.float32, got",
    ),
    "device": (
        {"key": torch.randn(B, G, N, D, device="meta")},
        "key must be on query's device cpu, got meta",
    ),
    "bias_device": (
        {"logit_bias": torch.randn(M, N, device="meta")},
        "logit_bias must be on query's device cpu, got meta",
    ),
    "slopes_device": (
        {"alibi_slopes": torch.randn(H, device="meta")},
        "alibi_slopes must be on query's device cpu, got meta",
    ),
    "grouping": (
        {"key": torch.randn(B, 3, N, D), "value": torch.randn(B, 3, N, V)},
        "query heads must be a multiple of key heads, got 4 and 3",
    ),
    "mask_shape": ({"visible": torch.ones(B, 1, M, 4).bool()}, "visible must be broadcastable to"),
    "mask_dtype": (
        {"visible": torch.ones(B, 1, M, N)},
        "visible must be bool .* got torch.float32",
    ),
    "interval_shape": (
        {"visible": torch.ones(B, M, 3).int()},
        r"visible as row intervals must be \[2, 3, 2\]",
    ),
    "bias_shape": ({"logit_bias": torch.randn(B, H, M, 4)}, "logit_bias must be broadcastable to"),
    "slopes_shape": (
        {"alibi_slopes": torch.randn(3)},
        r"alibi_slopes must be \[4\] or \[2, 4\], got \[3\]",
    ),
    "slopes_kind": ({"alibi_slopes": [1.0, 2.0]}, "alibi_slopes must be a tensor, got list"),
    "softcap": ({"softcap": 0.0}, "softcap must be positive and finite, or None, got 0.0"),
    "scaling": ({"scaling": float("nan")}, "scaling must be finite, got nan"),
    "dropout": ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    "backend": (
        {"backend": "cuda"},
        "backend must be one of auto, triton, torch, reference, got 'cuda'",
    ),
}
BAD_ROWS = {
    "shape": (torch.randn(B, H, 2), r"must be broadcastable to \[2, 4, 3\], got \[2, 4, 2\]"),
    "dims": (torch.randn(1, B, H, M), r"must be broadcastable to \[2, 4, 3\], got \[1, 2, 4, 3\]"),
    "nan": (torch.tensor([1.0, float("nan"), 2.0]), "must be finite, got 1 values not so"),
    "infinite": (float("inf"), "must be finite, got inf"),
    "integer": (torch.ones(3, dtype=torch.int64), "must be a float tensor, got torch.int64"),
    "kind": ("log", "must be a float or a tensor, got str"),
    "device": (torch.ones(3, device="meta"), "must be on query's device cpu, got meta"),
}


@pytest.mark.parametrize("function", VERBS)
@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(function, case):
    wrong, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        VERBS[function](**{**good(), **wrong})


@pytest.mark.parametrize("function", VERBS)
@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_per_query_terms_are_named(function, case):
    row, message = BAD_ROWS[case]
    with pytest.raises(ValueError, match=f"{ROW[function]} {message}"):
        VERBS[function](**good(), **{ROW[function]: row})


def test_bad_sinks_are_named_and_sigmoid_has_none():
    with pytest.raises(ValueError, match=r"sinks must be \[4\], got \[2\]"):
        functional.ssmax_attention(**good(), sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="sinks must be on query's device cpu, got meta"):
        functional.ssmax_attention(**good(), sinks=torch.zeros(4, device="meta"))
    with pytest.raises(TypeError, match="sinks"):
        functional.sigmoid_attention(**good(), sinks=torch.zeros(4))


@pytest.mark.parametrize("function", VERBS)
def test_triton_without_a_gpu_is_refused_and_auto_takes_torch(function, monkeypatch):
    monkeypatch.setattr(functional, "_interprets", lambda: False)
    with pytest.raises(
        ValueError, match=r"backend='triton' cannot run .* expected tensors on a GPU, got cpu"
    ):
        VERBS[function](**good(), backend="triton")
    assert torch.equal(
        VERBS[function](**good_seeded()), VERBS[function](**good_seeded(), backend="torch")
    )


@pytest.mark.parametrize("function", VERBS)
@pytest.mark.parametrize("argument", ["query", "row", "logit_bias"])
def test_a_directional_derivative_is_exact_or_refused(function, argument):
    tensors = {**good(torch.float64), "logit_bias": torch.randn(M, N, dtype=torch.float64)}
    tensors[ROW[function]] = torch.rand(B, H, M, dtype=torch.float64)
    name = ROW[function] if argument == "row" else argument
    at = tensors.pop(name)
    along = torch.randn_like(at)

    def call(moved, backend="auto"):
        return VERBS[function](**tensors, **{name: moved}, backend=backend)

    _, found = torch.func.jvp(call, (at,), (along,))
    step = 1e-6
    expected = (call(at + step * along) - call(at - step * along)) / (2 * step)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    with pytest.raises(ValueError, match=r"no forward-mode derivative.* 'auto' takes it"):
        torch.func.jvp(lambda moved: call(moved, "torch"), (at,), (along,))


def test_a_gpu_before_sm_80_takes_torch(monkeypatch):
    """As far as a machine without one can be asked."""
    query = SimpleNamespace(
        is_cuda=True, dtype=torch.float16, device="cuda", shape=(1, 1, 1, 64), ndim=4
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "sm_80 or newer, got sm_75" in functional._triton_refusal(query, query)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert functional._triton_refusal(query, query) is None


@pytest.mark.parametrize("function", VERBS)
def test_a_broadcast_bias_is_not_made_as_large_as_the_weights(function):
    """Of what the verb itself makes; the backends read it where it lies."""
    bias = torch.randn(1, 1, M, N).masked_fill(torch.rand(M, N) < 0.3, -torch.inf)
    given, tensors = [], good()

    def record(query, key, value, row, intervals, mask, logit_bias, *rest):
        given.extend((mask, logit_bias))
        return query, None

    with pytest.MonkeyPatch.context() as patch, Largest() as largest:
        patch.setattr(functional.cpu, "attention", record)
        VERBS[function](**tensors, logit_bias=bias, visible=torch.ones(M, N).bool())
    assert given[0].shape == (B, H, M, N) and given[0].stride()[:2] == (0, 0)
    assert given[1].data_ptr() == bias.data_ptr() and given[1].shape == bias.shape
    assert largest.elements < B * H * M * N


@pytest.mark.parametrize("function", VERBS)
@pytest.mark.parametrize("shape", [(1, 1, 40, 48), (1, 4, 40, 48), (3, 1, 1, 48)])
def test_a_broadcast_bias_and_its_gradient_stay_as_small_as_they_are(function, shape):
    """In both passes of the kernels nothing is as large as the weights, [3, 4, 40, 48]."""
    q, k = (torch.randn(3, 4, length, 8).requires_grad_() for length in (40, 48))
    bias = torch.randn(shape).masked_fill(torch.rand(shape) < 0.2, -torch.inf).requires_grad_()
    with Largest() as largest:
        VERBS[function](q, k, k, logit_bias=bias, backend="triton").sum().backward()
    assert bias.grad.shape == shape
    assert largest.elements < 3 * 4 * 40 * 48


def good_seeded():
    torch.manual_seed(0)
    return good()


def test_log_sum_exp_is_of_the_logits():
    tensors = good()
    output, log_sum_exp = functional.ssmax_attention(
        **tensors, multiplier=1.5, return_log_sum_exp=True
    )
    key = tensors["key"].repeat_interleave(H // G, 1)
    z = tensors["query"] @ key.transpose(2, 3) * D**-0.5
    torch.testing.assert_close(log_sum_exp, torch.logsumexp(1.5 * z, -1))
    torch.testing.assert_close(output, functional.ssmax_attention(**tensors, multiplier=1.5))
    with pytest.raises(ValueError, match="return_log_sum_exp"):
        functional.ssmax_attention(**tensors, return_log_sum_exp=True, backend="reference")


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("function", VERBS)
def test_no_batch_and_no_queries_give_nothing(function, backend):
    q, k, v = good().values()
    window = torch.zeros(B, M, 2, dtype=torch.int32)
    none = VERBS[function](q[:0], k[:0], v[:0], visible=window[:0], softcap=9.0, backend=backend)
    assert none.shape == (0, H, M, V)
    none = VERBS[function](q[:, :, :0], k, v, softcap=9.0, backend=backend)
    assert none.shape == (B, H, 0, V)


@pytest.mark.parametrize("multiplier", [0.0, -1.0])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_minus_infinity_hides_whatever_the_multiplier(backend, multiplier):
    q = torch.ones(1, 1, 2, 4, requires_grad=True)
    bias = torch.tensor([[0.0, -torch.inf], [-torch.inf, -torch.inf]])
    output = functional.ssmax_attention(
        q, q.detach(), q.detach(), logit_bias=bias, multiplier=multiplier, backend=backend
    )
    output.sum().backward()
    assert torch.equal(output, torch.tensor([[[[1.0] * 4, [0.0] * 4]]]))
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("function", VERBS)
def test_a_logit_bias_that_becomes_minus_infinity_in_float32_hides_a_key(function):
    tensors, options = good(torch.float32), {ROW[function]: -0.5}
    hidden = torch.rand(B, H, M, N) < 0.4
    bias = torch.zeros(B, H, M, N, dtype=torch.float64)
    given = bias.masked_fill(hidden, torch.finfo(bias.dtype).min)
    expected = VERBS[function](**tensors, visible=~hidden, **options)
    found = VERBS[function](**tensors, logit_bias=given, **options)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("function", VERBS)
def test_minus_infinity_in_the_logit_bias_hides_a_key(function):
    tensors, hidden = good(), torch.rand(B, H, M, N) < 0.4
    bias = torch.randn(B, H, M, N)
    options = {ROW[function]: -0.5}
    given = VERBS[function](**tensors, logit_bias=bias.masked_fill(hidden, -torch.inf), **options)
    expected = VERBS[function](**tensors, logit_bias=bias, visible=~hidden, **options)
    torch.testing.assert_close(given, expected)
