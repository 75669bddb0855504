"""Kinds of models: what each reads of a text, and what it is asked about it.

causal     every token after those before it
seq2seq    the decoder writes the text that the encoder reads: every token after those before it
masked     tokens at a seeded 15 % of the places, where the encoder sees the mask token
features   nothing: a model without a language model's head has a last hidden state
"""

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_sigmoid.conversions import models
from hf_sigmoid.evals.loss import token_losses

METRICS = {
    "causal": "perplexity",
    "seq2seq": "perplexity of a text that the encoder reads",
    "masked": "pseudo-perplexity of masked tokens (15 %)",
    "features": "relative change of the last hidden state",
}
MASKED_SHARE = 0.15


def kind(model: PreTrainedModel) -> str:
    """A key of `METRICS`."""
    if model.can_generate():
        return "seq2seq" if model.config.is_encoder_decoder else "causal"
    masked = type(model).__name__ in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()
    return "masked" if masked else "features"


def reader(model: PreTrainedModel, part: str | None) -> PreTrainedModel:
    """The model that text is run through: without a language model's head the part's own."""
    return models.part_of(model, part).base_model if kind(model) == "features" else model


def check_reads_text(cls: type[PreTrainedModel]) -> None:
    """Raise ValueError if the input of models of this class is not text."""
    inputs = list(inspect.signature(cls.forward).parameters)[1:]
    if cls.main_input_name != "input_ids" or "input_ids" not in inputs:
        reads = inputs[0] if cls.main_input_name == "input_ids" else cls.main_input_name
        raise ValueError(f"the model must read text, got {cls.__name__}, which reads {reads}")


@torch.no_grad()
def check_runs_on_text(model: PreTrainedModel, part: str | None, ids: Tensor) -> None:
    """Raise ValueError if a model needs other inputs than token ids `[B, T]`."""
    text = reader(model, part)
    try:
        text(**feed(text, ids))
    except Exception as error:  # whatever a model raises that misses its sound, its boxes, …
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"{type(model).__name__} cannot be run on text alone: {type(error).__name__}: {reason}"
        ) from error


def check_mask_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The mask token of a masked language model, else None; ValueError if it has none."""
    if kind(model) != "masked":
        return None
    if tokenizer.mask_token_id is None:
        raise ValueError(
            f"{type(model).__name__} predicts masked tokens, and its tokenizer has no mask token"
        )
    return tokenizer.mask_token_id


def feed(model: PreTrainedModel, ids: Tensor, **given) -> dict[str, Tensor | bool]:
    """Arguments of the forward pass by which token ids `[B, T]` reach every attention module."""
    # The first weight of an offloaded model has no device of its own; hooks move what it gets.
    ids = ids.to("cpu" if model.device.type == "meta" else model.device)
    inputs = {"input_ids": ids}
    known = inspect.signature(model.forward).parameters
    if "decoder_input_ids" in known:
        inputs["decoder_input_ids"] = shifted(model, ids)
    if "use_cache" in known or model.can_generate():
        inputs["use_cache"] = False
    return inputs | given


def shifted(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The ids that a decoder reads which writes `ids`: its start token, and all but the last."""
    config = model.config.get_text_config(decoder=True)
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    owners = (model.generation_config, model.config, config)
    found = (getattr(owner, name, None) for name in names for owner in owners)
    start = next((token for token in found if token is not None), 0)
    return torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], 1)


def outputs(result) -> Tensor:
    """The logits of a forward pass, or its last hidden state."""
    for name in ("logits", "last_hidden_state"):
        if hasattr(result, name):
            return getattr(result, name)
    return result[0]


def losses(model: PreTrainedModel, ids: Tensor, mask_token: int | None = None) -> Tensor:
    """Cross entropy `[B, K]`, float32, of K tokens of each row: of all but the first, or masked."""
    if kind(model) == "causal":
        return token_losses(model, feed(model, ids)["input_ids"])
    if kind(model) == "masked":
        B, T = ids.shape
        order = torch.rand(B, T, generator=torch.Generator().manual_seed(0)).argsort(1)
        places = order[:, : max(1, round(MASKED_SHARE * T))].to(ids.device)
        logits = model(**feed(model, ids.scatter(1, places, mask_token))).logits
        places = places.to(logits.device)
        logits = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1]))
        labels = ids.to(logits.device).gather(1, places)
    else:
        logits = model(**feed(model, ids)).logits[:, 1:]
        labels = ids[:, 1:].to(logits.device)
    each = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), reduction="none"
    )
    return each.view(labels.shape)
