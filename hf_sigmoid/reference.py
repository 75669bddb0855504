"""The specification: both attention functions as a few lines of PyTorch, in float64 or float32.

    z_mn = τ q_m·k_n        then softcap·tanh(z / softcap), − slope_h |m + N − M − n|, + logit_bias
    sigmoid   o_m = Σ_n σ(z_mn + b_m) v_n
    ssmax     o_m = Σ_n softmax_n(c_m z_mn) v_n

Everything else in this package is compared with it. It stores the [B, H, M, N] weights, and so it
also serves `output_attentions=True`.

Sources: Ramapuram et al. 2024, arXiv:2409.04431 (sigmoid); Nakanishi 2025, arXiv:2501.19399
(SSMax).
"""

import torch
from torch import Tensor


def sigmoid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None = None,
    bias: float | Tensor = 0.0,
    visible: Tensor | None = None,
    is_causal: bool = False,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    logit_bias: Tensor | None = None,
    dropout: float = 0.0,
    upcast: bool = True,
) -> tuple[Tensor, Tensor]:
    """o_m = Σ_n σ(z_mn + b_m) v_n, and the weights. Arguments as `functional.sigmoid_attention`.

    Args:
        upcast: compute in float32 (float64 for float64 inputs); False computes in the inputs'
            dtype, which is the yardstick for the error that this dtype costs anybody.

    Returns:
        Output `[B, H, M, V]` in query's dtype, weights `[B, H, M, N]` in the computing dtype.
    """
    z, hidden, value = logits_of(
        query, key, value, scaling, visible, is_causal, softcap, alibi_slopes, logit_bias, upcast
    )
    weights = torch.sigmoid(z + row_of(bias, z)).masked_fill(hidden, 0.0)
    weights = torch.nn.functional.dropout(weights, dropout, training=dropout > 0)
    return (weights @ value).to(query.dtype), weights


def ssmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None = None,
    multiplier: float | Tensor = 1.0,
    visible: Tensor | None = None,
    is_causal: bool = False,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    logit_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    upcast: bool = True,
) -> tuple[Tensor, Tensor]:
    """o_m = Σ_n softmax_n(c_m z_mn) v_n, and the weights. Arguments as
    `functional.ssmax_attention`.

    Args and returns: as `sigmoid_attention` above.
    """
    z, hidden, value = logits_of(
        query, key, value, scaling, visible, is_causal, softcap, alibi_slopes, logit_bias, upcast
    )
    logits = (z * row_of(multiplier, z)).masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.to(z.dtype).view(1, -1, 1, 1).expand(*z.shape[:3], 1)
        logits = torch.cat([logits, sink], -1)
    # A row that sees nothing would be 0/0; its weights are zeroed, so any finite logits do.
    logits = logits.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    weights = torch.softmax(logits, -1)[..., : key.shape[2]].masked_fill(hidden, 0.0)
    weights = torch.nn.functional.dropout(weights, dropout, training=dropout > 0)
    return (weights @ value).to(query.dtype), weights


def logits_of(
    query, key, value, scaling, visible, is_causal, softcap, alibi_slopes, logit_bias, upcast
):
    """z [B, H, M, N], the hidden keys as bool [B, H, M, N], and value [B, H, N, V]."""
    B, H, M, D = query.shape
    G, N = key.shape[1:3]
    dtype = torch.promote_types(query.dtype, torch.float32) if upcast else query.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    key, value = key.repeat_interleave(H // G, 1), value.repeat_interleave(H // G, 1)

    z = query @ key.transpose(2, 3) * (D**-0.5 if scaling is None else scaling)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    rows = torch.arange(M, device=z.device)[:, None] + (N - M)
    columns = torch.arange(N, device=z.device)[None, :]
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(dtype).view(-1, H, 1, 1)
        z = z - slopes * (rows - columns).abs()
    shown = columns <= rows if is_causal else torch.ones_like(columns <= rows)
    if logit_bias is not None:
        # −inf hides a key: as a number, a multiplier of 0 or less would make it NaN or +inf.
        finite = logit_bias != float("-inf")
        shown = shown & finite
        z = z + logit_bias.masked_fill(~finite, 0.0).to(dtype)
    if visible is not None and visible.dtype == torch.bool:
        shown = shown & visible
    elif visible is not None:
        lo, hi = visible.view(B, 1, M, 2).unsqueeze(-1).unbind(3)
        shown = shown & (columns >= lo) & (columns < hi)
    return z, ~shown.expand(B, H, M, N), value


def row_of(number: float | Tensor, z: Tensor) -> float | Tensor:
    """A per-query term broadcastable to [B, H, M], shaped to meet z [B, H, M, N]."""
    return number.to(z.dtype).unsqueeze(-1) if isinstance(number, Tensor) else number
