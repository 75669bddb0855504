"""The arguments of the two verbs. What is wrong raises one ValueError, before any work.

Letters as in `functional.py`: B batch, H query heads, G key/value heads, M queries, N keys.
"""

import math

import torch
from torch import Tensor

BACKENDS = ("auto", "triton", "torch", "reference")


def check(function, query, key, value, scaling, row, visible, softcap, alibi_slopes, logit_bias,
          sinks, dropout, backend):  # fmt: skip
    """One ValueError that names what was given and what was expected, before any work."""
    name = "bias" if function == "sigmoid" else "multiplier"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    for label, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4 or not tensor.is_floating_point():
            given = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            given = f"{given} {tensor.dtype}" if isinstance(tensor, Tensor) else given
            raise ValueError(f"{label} must be a float tensor of four dimensions, got {given}")
    for label, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise ValueError(f"{label} must have query's dtype {query.dtype}, got {tensor.dtype}")
        if tensor.device != query.device:
            raise ValueError(
                f"{label} must be on query's device {query.device}, got {tensor.device}"
            )
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(
                f"{label} must have query's batch {query.shape[0]}, got {tensor.shape[0]}"
            )
    B, H, M, D = query.shape
    G, N = key.shape[1:3]
    if key.shape[3] != D:
        raise ValueError(f"key must have query's head dim {D}, got {key.shape[3]}")
    if value.shape[1:3] != (G, N):
        raise ValueError(
            f"value must have key's heads and length {[G, N]}, got {list(value.shape[1:3])}"
        )
    if G == 0 or H % G:
        raise ValueError(f"query heads must be a multiple of key heads, got {H} and {G}")

    _check_row(name, row, (B, H, M), query.device)
    if visible is not None:
        _check_visible(visible, B, H, M, N, query.device)
    for label, tensor in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise ValueError(f"{label} must be a tensor, got {type(tensor).__name__}")
    for label, tensor in (
        ("alibi_slopes", alibi_slopes), ("logit_bias", logit_bias), ("sinks", sinks),
    ):  # fmt: skip
        if isinstance(tensor, Tensor) and tensor.device != query.device:
            raise ValueError(
                f"{label} must be on query's device {query.device}, got {tensor.device}"
            )
    if alibi_slopes is not None and tuple(alibi_slopes.shape) not in ((H,), (B, H)):
        raise ValueError(f"alibi_slopes must be {[H]} or {[B, H]}, got {list(alibi_slopes.shape)}")
    if logit_bias is not None:
        if not isinstance(logit_bias, Tensor) or not logit_bias.is_floating_point():
            raise ValueError(f"logit_bias must be a float tensor, got {_describe(logit_bias)}")
        _check_broadcast("logit_bias", logit_bias, (B, H, M, N))
    if sinks is not None and tuple(sinks.shape) != (H,):
        raise ValueError(f"sinks must be {[H]}, got {list(sinks.shape)}")
    # Compared, and not asked by math.isfinite: a compiler's symbolic number is no float.
    if scaling is not None and not -math.inf < scaling < math.inf:
        raise ValueError(f"scaling must be finite, got {scaling}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite, or None, got {softcap}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")


def _check_row(name, row, shape, device):
    if not isinstance(row, Tensor):
        if isinstance(row, bool) or not isinstance(row, (int, float)):
            raise ValueError(f"{name} must be a float or a tensor, got {type(row).__name__}")
        if not -math.inf < row < math.inf:
            raise ValueError(f"{name} must be finite, got {row}")
        return
    if not row.is_floating_point():
        raise ValueError(f"{name} must be a float tensor, got {row.dtype}")
    if row.device != device:
        raise ValueError(f"{name} must be on query's device {device}, got {row.device}")
    _check_broadcast(name, row, shape)
    # To look at it elsewhere would wait for the device, or break a compiled graph.
    if row.is_cpu and not torch.compiler.is_compiling() and not torch.isfinite(row).all():
        raise ValueError(
            f"{name} must be finite, got {int((~torch.isfinite(row)).sum())} values not so"
        )


def _check_visible(visible, B, H, M, N, device):
    if not isinstance(visible, Tensor) or visible.dtype not in (torch.bool, torch.int32):
        raise ValueError(
            f"visible must be bool broadcastable to {[B, H, M, N]} or int32 {[B, M, 2]}, "
            f"got {_describe(visible)}"
        )
    if visible.device != device:
        raise ValueError(f"visible must be on query's device {device}, got {visible.device}")
    if visible.dtype == torch.bool:
        _check_broadcast("visible", visible, (B, H, M, N))
    elif tuple(visible.shape) not in ((B, M, 2), (B, 1, M, 2)):
        raise ValueError(
            f"visible as row intervals must be {[B, M, 2]} or {[B, 1, M, 2]}, "
            f"got {list(visible.shape)}"
        )


def _check_broadcast(name, tensor, shape):
    given = tuple(tensor.shape)
    fits = len(given) <= len(shape) and all(
        size in (1, full) for size, full in zip(given[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"{name} must be broadcastable to {list(shape)}, got {list(given)}")


def _describe(thing) -> str:
    if isinstance(thing, Tensor):
        return f"{thing.dtype} {list(thing.shape)}"
    return type(thing).__name__
