"""Comparison of a converted model with the original, in every way that it is run."""

import inspect
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_sigmoid.compat import CACHE
from hf_sigmoid.conversions.reading import feed, kind, outputs


@torch.no_grad()
def runs(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Logits of real tokens `[tokens, vocabulary]`: plain, padded, packed, decoded with a cache.

    An encoder is run plain and padded. Without a language model's head, the last hidden state.

    Args:
        ids: token ids `[B, T]` with T of at least 4.
    """
    inputs = feed(model, ids)
    ids = inputs["input_ids"]
    T = ids.shape[1]
    cut = T // 2
    padding = torch.ones_like(ids)
    padding[0, : T // 4] = 0
    # A decoder of its own reads real tokens only, of a text that is padded.
    real = slice(None) if "decoder_input_ids" in inputs else padding.bool()
    found = {
        "plain": outputs(model(**inputs)).flatten(0, 1),
        "padded": outputs(model(**inputs, attention_mask=padding))[real].flatten(0, -2),
    }
    if model.can_generate() and (decoded := _decoded(model, inputs, cut)) is not None:
        found["decoded with a cache"] = decoded.flatten(0, 1)
    known = inspect.signature(model.forward).parameters
    if kind(model) == "causal" and "position_ids" in known:
        positions = torch.cat([torch.arange(cut), torch.arange(T - cut)]).to(ids.device)
        packed = model(ids[:1], position_ids=positions[None], use_cache=False).logits
        found["packed"] = packed.flatten(0, 1)
    return found


def _decoded(model: PreTrainedModel, inputs: dict, cut: int) -> Tensor | None:
    """Logits of the first tokens at once, then of one after the other; None without a cache."""
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    ids, rest = inputs[name], {}
    if name == "decoder_input_ids":
        # One pass of the encoder serves every step; a step that is given its output needs no text.
        rest["encoder_outputs"] = model.get_encoder()(inputs["input_ids"])
    step = model(**{name: ids[:, :cut]}, **rest, use_cache=True)
    if getattr(step, CACHE, None) is None:
        return None  # recurrent_gemma keeps its state to itself
    decoded = [step.logits]
    for position in range(cut, ids.shape[1]):
        token = ids[:, position : position + 1]
        given = {name: token, CACHE: getattr(step, CACHE)}
        step = model(**given, **rest, use_cache=True)
        decoded.append(step.logits)
    return torch.cat(decoded, 1)


@torch.no_grad()
def unreached(model: PreTrainedModel, ids: Tensor, names: Iterable[str], root: nn.Module) -> list:
    """Those attention modules of `root`, by name, that text does not get to in `model`."""
    modules = dict(root.named_modules())
    seen: set[str] = set()
    hooks = [
        modules[name].register_forward_pre_hook(lambda *_, name=name: seen.add(name))
        for name in names
    ]
    model(**feed(model, ids))
    for hook in hooks:
        hook.remove()
    return [name for name in names if name not in seen]


def differences(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of a logit, by way of running."""
    return {way: (after[way] - before[way]).abs().max().item() for way in before}
