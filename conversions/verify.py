"""Whether a converted model computes what the original did, in every way that it is run."""

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def runs(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Logits of real tokens `[tokens, vocabulary]`: plain, padded, packed, decoded with a cache.

    Args:
        ids: token ids `[B, T]` with T of at least 4.
    """
    ids = ids.to(model.device)
    T = ids.shape[1]
    cut = T // 2
    padding = torch.ones_like(ids)
    padding[0, : T // 4] = 0
    padded = model(ids, attention_mask=padding, use_cache=False).logits
    first = model(ids[:, :cut], use_cache=True)
    decoded = [first.logits]
    for position in range(cut, T):
        step = model(ids[:, position : position + 1], cache=first.cache, use_cache=True)
        decoded.append(step.logits)
    found = {
        "plain": model(ids, use_cache=False).logits.flatten(0, 1),
        "padded": padded[padding.bool()],
        "decoded with a cache": torch.cat(decoded, 1).flatten(0, 1),
    }
    if "position_ids" in inspect.signature(model.forward).parameters:
        positions = torch.cat([torch.arange(cut), torch.arange(T - cut)]).to(ids.device)
        packed = model(ids[:1], position_ids=positions[None], use_cache=False).logits
        found["packed"] = packed.flatten(0, 1)
    return found


def differences(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of a logit, by way of running."""
    return {way: (after[way] - before[way]).abs().max().item() for way in before}
