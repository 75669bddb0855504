"""From transformers' mask arguments to row intervals: the one contiguous range of keys each query
sees.

Every mask that transformers makes in practice lets row m see keys [lo_m, hi_m): causal, padding,
sliding window, chunks, packed documents, a static cache's unused tail, bidirectional blocks. An
int32 tensor [B, 1, M, 2] says all of it in O(M) memory, and n_m = hi_m − lo_m exactly. Where a
row's keys are not contiguous the dense boolean mask is kept: slower, never wrong.
"""

import torch
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)

from hf_sigmoid.context_parallel import layout as context

# Booleans of the index mask that are made and reduced together: on a CPU they stay in its cache; a
# GPU would spend its time launching such small blocks.
BLOCK_ELEMENTS = {"cpu": 1 << 20, "other": 1 << 28}

# What row intervals keep their log n under.
LOG_N = "_hf_sigmoid_log_n"

# Families that compute with the mask themselves, so they need it as transformers makes it.
DENSE = {
    "axk2", "bigbird_pegasus", "deepseek_v32", "doge", "dots3_note", "glm_moe_dsa", "hy_v4",
    "hy_v4_vl", "lasr", "lightglue", "mistral_large4", "nemotron_asr_streaming", "parakeet",
    "pix2struct", "qwen4_exp", "siglip2", "t5gemma2",
}  # fmt: skip

# The same, by arithmetic on an additive mask: a block bias that is put beside it, a router that
# reads padding from it.
ADDITIVE = {"deepseek_v4", "nllb_moe"}

# An entry of an additive mask that hides its key: at most this. Some models write −10000 instead of
# the lowest number of the type (markuplm, mllama's); bfloat16 makes −9984 of it.
HIDDEN = -9900.0


def interval_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config=None,
    **kwargs,
) -> Tensor | None:
    """The mask function that transformers calls for our two names.

    Returns:
        int32 row intervals `[B, 1, M, 2]`, or a bool mask `[B, 1, M, N]` where some row's keys are
        not contiguous, or what the families above need. None only where a model lets a mask that
        hides nothing be left out, as transformers' own functions do. Never for a causal one: what
        None means is then up to a flag of each attention module, and causal models that
        transformers runs in eager mode only leave it False.
    """

    def dense(start: int, rows: int) -> Tensor:
        return sdpa_mask(
            batch_size, rows, kv_length, q_offset + start, kv_offset, mask_function, attention_mask,
            local_size, False, False, use_vmap=use_vmap, device=device,
        )  # fmt: skip

    families = _families(config)
    if families & DENSE:
        return dense(0, q_length)
    if families & ADDITIVE:
        return eager_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            kwargs.get("dtype", torch.float32), use_vmap=use_vmap, device=device,
        )  # fmt: skip
    if context.OPEN:
        mask = context.mask_of(
            config, batch_size, q_length, kv_length, q_offset, kv_offset, mask_function,
            attention_mask,
        )  # fmt: skip
        if mask is not None:
            return mask
    everything = _sees_all(attention_mask, kv_offset + kv_length)
    if (
        everything
        and allow_is_bidirectional_skip
        # A length that may vary is not compared: it would be bounded from then on.
        and (local_size is None or (not torch.compiler.is_compiling() and kv_length < local_size))
        # A decoder made bidirectional by its config: its modules still say that they are causal.
        and getattr(config, "is_causal", None) is not False
    ):
        # Some (muse_glimmer_assistant) make this mask for fewer keys than they then have.
        return None
    if everything and mask_function in (
        causal_mask_function,
        bidirectional_mask_function,
    ):
        hi = torch.full((q_length,), kv_length, dtype=torch.int32, device=device)
        if mask_function is causal_mask_function:
            rows = torch.arange(1, q_length + 1, dtype=torch.int32, device=device)
            hi = torch.minimum(hi, (rows + (q_offset - kv_offset)).clamp(min=0).to(torch.int32))
        return torch.stack([0 * hi, hi], -1).expand(batch_size, 1, q_length, 2)
    if torch.compiler.is_compiling():
        # A compiler fuses mask and reductions, and must not see a loop whose length depends on a
        # shape: a length that may vary would become this one.
        parts = [_reduce(dense(0, q_length))]
    else:
        elements = BLOCK_ELEMENTS["cpu" if torch.device(device).type == "cpu" else "other"]
        step = max(1, elements // (batch_size * kv_length))
        parts = [
            _reduce(dense(start, min(step, q_length - start))) for start in range(0, q_length, step)
        ]
    lo, hi, count = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    contiguous = (count == hi - lo).all()
    if torch.compiler.is_compiling():
        torch._assert_async(
            contiguous, "a compiled model needs masks without holes: each row's keys contiguous"
        )
    elif not contiguous:
        return dense(0, q_length)
    intervals = torch.stack([lo, hi], -1).to(torch.int32)
    return intervals.expand(batch_size, q_length, 2).unsqueeze(1)


def _families(config) -> set[str]:
    """The families (transformers.models.FAMILY.…) of a config's class and of its bases."""
    modules = (cls.__module__.split(".") for cls in type(config).__mro__)
    return {parts[-2] for parts in modules if len(parts) > 1}


def is_intervals(mask: Tensor) -> bool:
    """Is this attention mask our own int32 [B, 1, M, 2]?"""
    return mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[-1] == 2


def packed_intervals(
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    M: int,
    N: int,
    is_causal: bool,
    window: int | None,
) -> Tensor:
    """Row intervals int32 [1, 1, M, 2] of packed sequences, from cumulative lengths.

    Lower-right causal inside each sequence; rows beyond the last sequence see nothing. Never waits
    for a GPU.
    """
    rows = torch.arange(M, device=cu_seq_lens_q.device)
    ends_q, ends_k = cu_seq_lens_q.long(), cu_seq_lens_k.long()
    document = torch.searchsorted(ends_q[1:].contiguous(), rows, right=True).clamp(
        max=ends_q.numel() - 2
    )
    lo, hi = ends_k[document], ends_k[document + 1]
    if is_causal:
        hi = hi - (ends_q[document + 1] - 1 - rows)
    if window:
        lo = torch.maximum(lo, hi - window)
    hi = torch.where(rows < ends_q[-1], hi.clamp(0, N), 0)
    return torch.stack([lo.clamp(0, N).minimum(hi), hi], -1).to(torch.int32)[None, None]


def narrow(mask: Tensor | None, intervals: Tensor, N: int) -> Tensor:
    """`mask`, of any form, restricted to row intervals."""
    if mask is None:
        return intervals
    lo, hi = intervals.unbind(-1)
    if is_intervals(mask):
        lo = torch.maximum(lo, mask[..., 0])
        return torch.stack([lo, torch.maximum(lo, torch.minimum(hi, mask[..., 1]))], -1)
    columns = torch.arange(N, device=mask.device)
    return keep(mask, (columns >= lo.unsqueeze(-1)) & (columns < hi.unsqueeze(-1)), False)


def keep(mask: Tensor | None, kept: Tensor, is_causal: bool) -> Tensor:
    """`mask`, of any form, restricted to the keys of a bool mask [B, 1, M, N]."""
    M, N = kept.shape[-2:]
    if mask is None:
        return kept.tril(N - M) if is_causal else kept
    if is_intervals(mask):
        columns = torch.arange(N, device=mask.device)
        inside = (columns >= mask[..., :1]) & (columns < mask[..., 1:])
        return inside & kept
    if mask.dtype == torch.bool:
        return mask[..., :N] & kept
    return mask[..., :N].masked_fill(~kept, torch.finfo(mask.dtype).min)


def visible_keys(mask: Tensor | None, M: int, N: int, is_causal: bool, device: torch.device):
    """The attention mask that a model hands over, as arguments of the two verbs.

    Returns:
        `visible` (or None), `is_causal`, `logit_bias` (or None), and log n of the n keys that each
        query sees (0 of none), float32, broadcastable to [B, H, M].
    """
    if mask is None:
        if not is_causal or M == 1:
            count = torch.full((1, 1, M), N, dtype=torch.float32, device=device)
            return None, False, None, _log(count)
        count = torch.arange(1, M + 1, device=device, dtype=torch.float32) + (N - M)
        return None, True, None, _log(count.view(1, 1, M))
    if is_intervals(mask):
        return mask, False, None, _log_n(mask)
    mask = mask[..., :N]
    if mask.dtype == torch.bool:
        return mask, False, None, _log(mask.sum(-1))
    if not mask.is_floating_point():
        raise ValueError(
            f"an attention mask must be bool or float, got {mask.dtype} {list(mask.shape)}"
        )
    # An additive mask: its most negative entries hide, the others are added to the logits.
    shown = mask > HIDDEN
    return shown, False, torch.where(shown, mask, 0.0), _log(shown.sum(-1))


def _log(count: Tensor) -> Tensor:
    return count.float().clamp(min=1).log()


def _log_n(intervals: Tensor) -> Tensor:
    """log n of row intervals, once for all layers that share them: they keep it until written to.

    Not in a CUDA graph, whose replays read other intervals from the same memory.
    """
    lo, hi = intervals.unbind(-1)
    if (
        torch.compiler.is_compiling()
        or intervals.is_inference()
        or (intervals.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return _log(hi - lo)
    version, log_n = getattr(intervals, LOG_N, (None, None))
    if version != intervals._version:
        log_n = _log(hi - lo)
        setattr(intervals, LOG_N, (intervals._version, log_n))
    return log_n


def _sees_all(attention_mask: Tensor | None, length: int) -> bool:
    """Does this padding mask hide no key? Keys beyond its end are hidden."""
    if attention_mask is None:
        return True
    if torch.compiler.is_compiling() or attention_mask.shape[-1] < length:
        return False
    return bool(attention_mask.all())


def _reduce(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First visible key, one past the last, and their number, each [B, M], of [B, 1, M, N]."""
    mask = mask[:, 0]
    N = mask.shape[-1]
    columns = torch.arange(N, dtype=torch.int32, device=mask.device)
    hi = torch.where(mask, columns + 1, 0).amax(-1)
    lo = torch.where(mask, columns, N).amin(-1).minimum(hi)
    return lo, hi, mask.sum(-1)
