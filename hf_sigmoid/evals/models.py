"""The models of an evaluation: which weights, which attention function, how many positions."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_sigmoid.embedded import checkpoint
from hf_sigmoid.errors import BadInput
from hf_sigmoid.loading import (
    check_weights,
    fingerprint,
    load_model,
    load_tokenizer,
    positions_of,
    twin,
)
from hf_sigmoid.parameters import HOLDER, attention_modules
from hf_sigmoid.rope import Change, change_rope, check_rope


@dataclass(frozen=True)
class EvaluatedModel:
    """One model under one attention function.

    Args:
        name: what it is called, as `PATH`, `PATH@ATTN`, `PATH+yarn:4`.
        path: as it was given; `source` is what loads.
        attn: the function it runs under, None for the checkpoint's own.
        rope: a change of its RoPE for this evaluation, as `yarn:4`.
    """

    name: str
    path: str
    source: str
    attn: str | None
    rope: str | None
    weights: str  # a hash of config and weights; a hub id's revision
    positions: int | None  # the model was made for, after the RoPE change
    learned_positions: bool  # a vector for each: there are no others
    rope_switch: int | None  # positions at which its RoPE takes other frequencies
    rope_is_dynamic: bool  # and others again with every token
    runs: str  # the attention functions of its layers
    tokenizer: Any

    @classmethod
    def find(cls, given: str, attn: str | None = None, rope: str | None = None) -> "EvaluatedModel":
        """A model that can be loaded, without loading its weights.

        Args:
            given: `PATH`, or `PATH@ATTN`, which wins over `attn`.

        Raises:
            BadInput: no such model, weights that are not whole safetensors, an attention function
                or RoPE that it cannot have.
        """
        path, at, named = given.rpartition("@")
        # A folder's own name may hold an @.
        if not at or Path(given).exists():
            path, named = given, None
        attn = named or attn
        name = (f"{path}@{attn}" if attn else path) + (f"+{rope}" if rope else "")
        source = checkpoint(path)
        model = twin(source, attn)
        check_weights(source)
        positions = positions_of(model.config)
        if rope:
            positions = _change(model, rope).positions(model.config)
        kind, switch = _rope_switch(model.config)
        return cls(
            name, path, source, attn, rope, fingerprint(source), positions,
            _learns_positions(model), switch, kind == "dynamic",
            attention_names(model), load_tokenizer(source),
        )  # fmt: skip

    def load(self, dtype: torch.dtype, device: str) -> Any:
        """The model, ready to be asked.

        Raises:
            BadInput: weights that are missing, which would be random.
        """
        model, found = load_model(
            self.source, dtype=dtype, attn=self.attn, output_loading_info=True
        )
        # The per-query terms of a softmax checkpoint that is run as ours begin where they are
        # defined to.
        lost = [key for key in found["missing_keys"] if f".{HOLDER}." not in key]
        if lost or found["mismatched_keys"]:
            raise BadInput(
                f"model {self.path}: expected all weights, its files lack "
                f"{', '.join(map(str, [*lost, *found['mismatched_keys']][:3]))}"
            )
        if self.rope:
            change_rope(model, _change(model, self.rope))
        return model.to(device).eval()


def attention_names(model: Any) -> str:
    """The attention functions of a model's layers: `ssmax`, `sdpa+sigmoid` of a composite one."""
    modules = [module for _, module in attention_modules(model)] or [model]
    return "+".join(sorted({str(module.config._attn_implementation) for module in modules}))


def _change(model: Any, rope: str) -> Change:
    """A change of RoPE for this model: YaRN sharpens logits unless SSMax does."""
    try:
        change = check_rope(model, rope, "ssmax")
    except ValueError as error:
        raise BadInput(str(error)) from None
    return change if attention_names(model) == "ssmax" else replace(change, attention_factor=None)


def _learns_positions(model: Any) -> bool:
    """True if a table has a row for each of the text's positions; OPT's has two more."""
    positions = positions_of(model.config)
    return positions is not None and any(
        isinstance(module, nn.Embedding)
        and re.search(r"wpe|position", name)
        and module.num_embeddings - positions in (0, 1, 2)
        for name, module in model.named_modules()
    )


def _rope_switch(config: Any) -> tuple[str | None, int | None]:
    """The kind of a RoPE whose frequencies depend on the length, and from where on they do."""
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    found = []
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        switch = config.max_position_embeddings
        if each.get("rope_type") == "longrope":
            switch = each.get("original_max_position_embeddings") or switch
        if each.get("rope_type") in ("longrope", "dynamic"):
            found.append((switch, each["rope_type"]))
    switch, kind = min(found, default=(None, None))
    return kind, switch
