"""Another RoPE beside ssmax, which does little for a pretrained model beyond its length by itself.

    theta:F   θ becomes F θ
    ntk:F     θ becomes F^(d / (d − 2)) θ, d rotary dimensions: NTK, static. The lowest frequency is
              divided by F, the highest stays.
    yarn:F    YaRN with an attention factor of 1, since sharpening the logits is what ssmax does

All allow F times the positions. NTK is static because a dynamic one would meet keys in the cache
that were rotated with other frequencies. `config.hf_sigmoid_rope` keeps what was there before:

    {"change": "yarn:4", "rope_parameters": {…}, "max_position_embeddings": 8192}
"""

import copy
import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_sigmoid.compat import rope_kinds
from hf_sigmoid.parameters import sub_configs

KINDS = ("theta", "ntk", "yarn")
RECORD = "hf_sigmoid_rope"
# A RoPE with more keys than these is not a plain one.
PLAIN = {"rope_type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True)
class Change:
    """One of the three, by the factor F."""

    kind: str
    factor: float
    attention_factor: float | None = 1.0  # YaRN's on the logits; None: its own

    @classmethod
    def parse(cls, given: str) -> "Change":
        """ "yarn:4" -> YaRN by 4; ValueError if it is not of that form."""
        kind, _, number = given.partition(":")
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if kind not in KINDS or not (math.isfinite(factor) and factor > 1):
            raise ValueError(
                f"--rope must be {', '.join(f'{each}:F' for each in KINDS)} with a factor F above "
                f"1, got {given!r}"
            )
        return cls(kind, factor)

    def __str__(self) -> str:
        return f"{self.kind}:{self.factor:g}"

    def positions(self, config: PreTrainedConfig) -> int:
        """The positions of the changed model."""
        return int(config.max_position_embeddings * self.factor)

    def parameters(self, config: PreTrainedConfig, dims: int) -> dict:
        """The new `config.rope_parameters`, for so many rotary dimensions."""
        before = config.rope_parameters
        if self.kind == "yarn":
            sharpens = {} if self.attention_factor is None else {"attention_factor": 1.0}
            return {
                **before,
                "rope_type": "yarn",
                "factor": self.factor,
                **sharpens,
                "original_max_position_embeddings": config.max_position_embeddings,
            }
        if self.kind == "ntk" and dims <= 2:
            raise ValueError(f"--rope: ntk needs more than {dims} rotary dimensions")
        power = dims / (dims - 2) if self.kind == "ntk" else 1.0
        return {**before, "rope_theta": before["rope_theta"] * self.factor**power}


def check(config: PreTrainedConfig, function: str) -> None:
    """ValueError unless this config's RoPE is a plain one, and the function ssmax."""
    if function != "ssmax":
        raise ValueError(f"--rope goes with ssmax, got {function}")
    if parts := sub_configs(config):
        raise ValueError(
            f"--rope: the model must be a plain language model, {config.model_type} is composed of "
            f"{', '.join(parts)}"
        )
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or not parameters:
        raise ValueError(f"--rope: the model must have RoPE, {config.model_type} has none")
    if kinds := rope_kinds(config, parameters):
        raise ValueError(
            f"--rope: the model must have one RoPE, {config.model_type} has one for each of "
            f"{', '.join(kinds)}"
        )
    kind = parameters.get("rope_type", "default")
    if kind != "default" or (further := parameters.keys() - PLAIN):
        found = f"the type {kind!r}" if kind != "default" else ", ".join(sorted(further))
        raise ValueError(
            f"--rope: the model must have plain RoPE, {config.model_type}'s already has {found}"
        )
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        raise ValueError(f"--rope: {config.model_type} does not say how many positions it has")


def check_rope(model: PreTrainedModel, given: str, function: str) -> Change:
    """The change that was asked for, ValueError if this model's RoPE cannot be changed so."""
    change = Change.parse(given)
    _check_first(model)
    check(model.config, function)
    _changed(model, change)
    return change


def change_rope(model: PreTrainedModel, change: Change | str) -> None:
    """Change a model's RoPE in place, and keep what it was in its config. Not an identity.

    Raises:
        ValueError: not a plain RoPE, or one that was changed already.
    """
    change = Change.parse(change) if isinstance(change, str) else change
    _check_first(model)
    check(model.config, "ssmax")
    config = _changed(model, change)
    record = {
        "change": str(change),
        "rope_parameters": copy.deepcopy(model.config.rope_parameters),
        "max_position_embeddings": model.config.max_position_embeddings,
    }
    _set(model, config.rope_parameters, config.max_position_embeddings)
    setattr(model.config, RECORD, record)


def _check_first(model: PreTrainedModel) -> None:
    if record := getattr(model.config, RECORD, None):
        raise ValueError(f"--rope: the RoPE was changed already, by {record['change']}")


def restore_rope(model: PreTrainedModel) -> bool:
    """Take the change back out of a model, in place. Was there one?"""
    record = getattr(model.config, RECORD, None)
    if record is None:
        return False
    delattr(model.config, RECORD)
    _set(model, copy.deepcopy(record["rope_parameters"]), record["max_position_embeddings"])
    return True


def _set(model: PreTrainedModel, parameters: dict, positions: int) -> None:
    model.config.rope_parameters = parameters
    model.config.max_position_embeddings = positions
    for rotary in _rotaries(model):
        fresh = type(rotary)(model.config)
        # In place, since accelerate may have hooked the module.
        for name, buffer in fresh.named_buffers(recurse=False):
            setattr(rotary, name, buffer.to(rotary.inv_freq.device))
        public = {name: value for name, value in vars(fresh).items() if not name.startswith("_")}
        vars(rotary).update({**public, "training": rotary.training})


def _changed(model: PreTrainedModel, change: Change) -> PreTrainedConfig:
    """The config with the change, from which transformers can make this model's rotaries."""
    config = copy.deepcopy(model.config)
    for rotary in _rotaries(model):
        old = rotary.inv_freq
        config.rope_parameters = change.parameters(model.config, 2 * old.numel())
        config.max_position_embeddings = change.positions(model.config)
        try:
            config.validate_rope()
            new = type(rotary)(config).inv_freq
        except Exception as error:  # phi3 validates otherwise, mixtral's head_dim is None, …
            raise ValueError(
                f"--rope: transformers cannot make {change} for {config.model_type}: {error}"
            ) from error
        if new.shape != old.shape or (not old.is_meta and torch.equal(new, old.float().cpu())):
            raise ValueError(
                f"--rope: {type(rotary).__name__} of {config.model_type} does not follow "
                "its config.rope_parameters"
            )
    return config


def _rotaries(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that make the angles from the config."""
    found = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "rope_type", None), str) and hasattr(module, "inv_freq")
    ]
    if not found or any(module.config is not model.config for module in found):
        raise ValueError(f"--rope: {type(model).__name__} has no rotary embedding of its own")
    return found
