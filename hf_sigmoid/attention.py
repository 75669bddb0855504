"""What transformers calls for both names: from its arguments to those of the two verbs."""

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from hf_sigmoid import functional, masks, reference
from hf_sigmoid.parameters import HOLDER

# Arguments that change what a row sees in a way no mask says. They reach us because our names are
# not "eager" or "sdpa"; ignoring them would turn sparse attention into dense.
REFUSED = {"indices": "index-sparse attention", "block_indices": "block-sparse attention"}


def attention(
    function: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool | None = False,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls: query `[B, H, M, D]`, key `[B, G, N, D]`, value `[B, G, N, V]`.

    Returns:
        Output `[B, M, H, V]`, contiguous, and the weights `[B, H, M, N]` if `output_attentions`,
        else None.

    Raises:
        ValueError: the model passes an argument that this function cannot honour.
    """
    for name, what in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{function}: {type(module).__name__} passes `{name}` ({what}), "
                "which is not supported"
            )
    holder = getattr(module, HOLDER, None)
    if holder is not None and holder.function == "softmax":
        function = "softmax"  # a layer that the section leaves as it was
    sinks = s_aux if sinks is None else sinks
    if sinks is not None and function == "sigmoid":
        raise ValueError(
            f"sigmoid: {type(module).__name__} has attention sinks, "
            "a term of a softmax's denominator; "
            "sigmoid attention has none. Use attn_implementation='ssmax'"
        )

    # Under autocast q and k may arrive as float32 (RoPE) and v in the autocast dtype; norms kept in
    # float32 do the same.
    device = query.device
    dtype = (
        torch.get_autocast_dtype(device.type)
        if torch.is_autocast_enabled(device.type)
        else value.dtype
    )
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    M, N = query.shape[2], key.shape[2]
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if cu_seq_lens_q is not None:
        # Not every model lets its mask know of packed documents, but these reach every attention.
        packed = masks.packed_intervals(
            cu_seq_lens_q, cu_seq_lens_k, M, N, is_causal, sliding_window
        ).expand(query.shape[0], 1, M, 2)
        attention_mask = masks.narrow(attention_mask, packed, N)
    visible, is_causal, logit_bias, count = masks.visible_keys(
        attention_mask, M, N, is_causal, device
    )
    if position_bias is not None:
        logit_bias = position_bias if logit_bias is None else logit_bias + position_bias

    options = {
        "scaling": scaling, "visible": visible, "is_causal": is_causal, "softcap": softcap,
        "logit_bias": logit_bias, "dropout": dropout,
    }  # fmt: skip
    log_n = torch.log(count.clamp(min=1))
    # A holder of the other function (the model runs under another name) says nothing about this.
    owned = holder is not None and holder.function == function != "softmax"
    if function == "sigmoid":
        options["bias"] = holder(log_n, query) if owned else -log_n
    else:
        options["multiplier"] = holder(log_n, query) if owned else 1.0
        options["sinks"] = sinks
    name = "sigmoid" if function == "sigmoid" else "ssmax"
    if output_attentions or _records_attentions():
        output, weights = getattr(reference, f"{name}_attention")(query, key, value, **options)
        weights = weights.to(dtype)
    else:
        output, weights = (
            getattr(functional, f"{name}_attention")(query, key, value, **options),
            None,
        )
    return output.transpose(1, 2).contiguous(), weights


def _records_attentions() -> bool:
    """Is the model collecting weights? Some (gpt2) do not pass `output_attentions` on."""
    collected = _active_collector.get()
    return collected is not None and any(key.endswith("attentions") for key in collected)
