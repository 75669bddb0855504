"""What a conversion costs: perplexity of a model on fixed windows of a text."""

import math

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def token_windows(tokenizer: PreTrainedTokenizerBase, text: str, length: int, count: int) -> Tensor:
    """`count` windows of `length` tokens, `[count, length]`, spread evenly over the text.

    They do not overlap; a text that has fewer windows gives those that it has.

    Raises:
        ValueError: the text has fewer than `length` tokens.
    """
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    available = len(ids) // length
    if available == 0:
        raise ValueError(f"the text must have at least {length} tokens, got {len(ids)}")
    chosen = torch.linspace(0, available - 1, min(count, available)).round().long()
    return ids[: available * length].view(available, length)[chosen]


@torch.no_grad()
def perplexity(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    batch_size: int = 4,
    name: str = "perplexity",
    progress: bool = True,
) -> float:
    """exp of the mean cross entropy of every token but the first of each window, in float32."""
    training = model.training
    model.eval()
    total, tokens = 0.0, 0
    for batch in tqdm(windows.split(batch_size), desc=name, disable=not progress):
        batch = batch.to(model.device)
        logits = model(batch, use_cache=False).logits[:, :-1].float()
        labels = batch[:, 1:]
        total += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        ).item()
        tokens += labels.numel()
    model.train(training)
    return math.exp(min(total / tokens, 700.0))
