"""The function that transformers calls for both names: its arguments become those of the verbs."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from hf_sigmoid import functional, masks, reference
from hf_sigmoid.context_parallel import layout as context
from hf_sigmoid.parameters import HOLDER, per_query_terms
from hf_sigmoid.support import Unsupported, refuse_sinks

# What `monitor.record` leaves on an attention module while it is open.
MAXIMA = "_hf_sigmoid_maxima"
# What an observer of weights leaves on one, so that every call returns its weights.
ROWS = "_hf_sigmoid_rows"

# Arguments that change what a row sees in a way no mask says. They reach us because our names are
# not "eager" or "sdpa"; ignoring them would turn sparse attention into dense.
REFUSED = {"block_indices": "block-sparse attention"}

# What models pass that says nothing which the mask or the arguments above do not say already.
WITHOUT_MEANING = {
    "position_ids": "the mask was made of them",
    "max_length_q": "of cu_seq_lens_q",
    "max_length_k": "of cu_seq_lens_k",
    "deterministic": "flash attention's choice of a backward pass; ours always is",
}


def attention(
    function: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    output_attentions: bool | None = False,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """The call of transformers: query `[B, H, M, D]`, key `[B, G, N, D]`, value `[B, G, N, V]`.

    Returns:
        Output `[B, M, H, V]`, contiguous, and the weights `[B, H, M, N]` if `output_attentions`,
        else None.

    Raises:
        Unsupported: the model passes an argument that this function cannot honour.
    """
    holder = getattr(module, HOLDER, None)
    if holder is not None and holder.function == "softmax":
        function = "softmax"  # a layer that the section leaves as it was
    call = read(function, module, query, key, value, attention_mask, **kwargs)
    options = call.options
    # A holder of the other function (the model runs under another name) says nothing about this.
    owned = holder is not None and holder.function == function != "softmax"
    terms = call.log_n, call.query
    if function == "sigmoid":
        options["bias"] = per_query_terms(module, *terms) if owned else -call.log_n
    else:
        options["multiplier"] = per_query_terms(module, *terms) if owned else 1.0
        options["sinks"] = call.sinks
    name = "sigmoid" if function == "sigmoid" else "ssmax"
    verb, maxima = getattr(functional, f"{name}_attention"), getattr(module, MAXIMA, None)
    weights = None
    if output_attentions or getattr(module, ROWS, False) or _records_attentions():
        output, weights = getattr(reference, f"{name}_attention")(*call[:3], **options)
        weights = weights.to(call.query.dtype)
        if maxima is not None:
            undropped = {**options, "dropout": 0.0}
            maxima.add(verb(*call[:3], **undropped, return_statistics=True)[1].max_logit, options)
    elif maxima is None:
        output = verb(*call[:3], **options)
    else:
        output, statistics = verb(*call[:3], **options, return_statistics=True)
        maxima.add(statistics.max_logit, options)
    return output.transpose(1, 2).contiguous(), weights


class Call(NamedTuple):
    """Transformers' arguments as those of either verb, and log n of every query."""

    query: Tensor  # [B, H, M, D]
    key: Tensor  # [B, G, N, D]
    value: Tensor  # [B, G, N, V]
    options: dict  # by keyword, to both verbs
    log_n: Tensor  # broadcastable to [B, H, M]
    sinks: Tensor | None  # [H], ssmax's alone


def read(
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
    indices: Tensor | None = None,
    **kwargs,
) -> Call:
    """From transformers' arguments to the verbs'.

    Raises:
        Unsupported: the model passes an argument that `function` cannot honour.
    """
    for name, what in REFUSED.items():
        if kwargs.get(name) is not None:
            raise Unsupported(
                f"{function}: {type(module).__name__} passes `{name}` ({what}), "
                "which is not supported: use the model's own softmax"
            )
    sinks = s_aux if sinks is None else sinks
    if sinks is not None and function == "sigmoid":
        refuse_sinks(module)

    # Under autocast q and k may arrive as float32 (RoPE) and v in the autocast dtype; norms kept in
    # float32 do the same.
    device = query.device
    dtype = (
        torch.get_autocast_dtype(device.type)
        if torch.is_autocast_enabled(device.type)
        else value.dtype
    )
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    layout = context.layout_of(module, attention_mask)
    if layout is not None:
        given = {
            "position_bias": position_bias, "cu_seq_lens_q": cu_seq_lens_q,
            "cu_seq_lens_k": cu_seq_lens_k, "indices": indices,
        }  # fmt: skip
        key, value, attention_mask = layout.whole(
            function, module, query, key, value, attention_mask, given
        )
    M, N = query.shape[2], key.shape[2]
    # No mask comes where it would hide nothing, and where a model leaves the rule to a flag.
    # Without the flag it hides nothing, as in the eager functions of models that lack it (mllama).
    is_causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    is_one_row = attention_mask is not None and attention_mask.shape[2] != M
    if is_one_row and masks.is_intervals(attention_mask):  # lightglue asks for one row for all
        attention_mask = attention_mask.expand(-1, -1, M, -1)
    if cu_seq_lens_q is not None:
        if isinstance(cu_seq_lens_k, dict):
            cu_seq_lens_k = _of_layer(cu_seq_lens_k, module, function)
        # Not every model lets its mask know of packed documents, but these reach every attention.
        packed = masks.packed_intervals(
            cu_seq_lens_q, cu_seq_lens_k, M, N, is_causal, sliding_window
        ).expand(query.shape[0], 1, M, 2)
        attention_mask = masks.narrow(attention_mask, packed, N)
    if indices is not None:
        # Sparse attention as DeepSeek's: key numbers [B, M, K] that each row keeps, of all that the
        # mask shows. transformers' sdpa path makes the same dense mask.
        kept = torch.zeros(query.shape[0], 1, M, N, dtype=torch.bool, device=device)
        kept = kept.scatter(-1, indices.long().unsqueeze(1), True)
        attention_mask = masks.keep(attention_mask, kept, is_causal)
    visible, is_causal, logit_bias, log_n = masks.visible_keys(
        attention_mask, M, N, is_causal, device
    )
    if position_bias is not None:
        logit_bias = position_bias if logit_bias is None else logit_bias + position_bias

    options = {
        "scaling": scaling, "visible": visible, "is_causal": is_causal, "softcap": softcap,
        "logit_bias": logit_bias, "dropout": dropout,
    }  # fmt: skip
    return Call(query, key, value, options, log_n, sinks)


def _of_layer(lengths: dict[str, Tensor], module: nn.Module, function: str) -> Tensor:
    """Continuous batching has lengths by kind of layer; its cache picks one when it is updated.

    A layer that takes its keys from an earlier one (gemma3n's last) updates none and gets them all.
    """
    kind = getattr(module, "layer_type", None)
    if kind is None:
        kinds = getattr(module.config, "layer_types", None)
        kind = kinds[getattr(module, "layer_idx", 0) or 0] if kinds else "full_attention"
    if kind not in lengths:
        raise Unsupported(
            f"{function}: {type(module).__name__} gets lengths (cu_seq_lens_k) of layers of kinds "
            f"{sorted(lengths)} and is {kind!r}: continuous batching is not supported"
        )
    return lengths[kind]


def _records_attentions() -> bool:
    """Is the model collecting weights? Some (gpt2) do not pass `output_attentions` on."""
    # A context variable cannot be traced: in a graph transformers keeps the collector in this one.
    compiling = torch.compiler.is_compiling()
    collected = _active_collector.global_var if compiling else _active_collector.get()
    return collected is not None and any(key.endswith("attentions") for key in collected)
