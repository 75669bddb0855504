"""Models that context parallelism would compute wrongly, refused by name."""

import inspect
import re
from collections.abc import Iterator

from torch import nn

from hf_sigmoid import support
from hf_sigmoid.parameters import FUNCTIONS, attention_modules
from hf_sigmoid.support import Unsupported

LAYER_TYPES = {"full_attention", "sliding_attention"}

# Frequencies that depend on the largest position of a call, which differs between processes.
VARYING_ROPE = {"dynamic", "longrope"}

# Token mixers that are no attention, by the names of their classes.
MIXERS = re.compile(
    "Mamba|Rwkv|RgLru|Recurrent|SSM|DeltaNet|DeltaRule|LinearAttention|LightningAttention|"
    "ShortConv|Hyena|Retention"
)


def check_model(model: nn.Module) -> None:
    """Raise `Unsupported` if some part of a model would not see the other processes' tokens.

    Recognised are attention that does not run through us, what is not a causal decoder, other
    token mixers by their classes and configs, and numbers that depend on the length of a call.
    """
    attentions = attention_modules(model)
    if not attentions:
        raise Unsupported(
            f"context_parallel: {type(model).__name__} has no attention on transformers' interface"
        )
    for path, module in attentions:
        function = module.config._attn_implementation
        if function not in FUNCTIONS:
            raise Unsupported(
                f"context_parallel: {path} ({type(module).__name__}) runs {function!r} attention, "
                f"which would see this process's keys only: use {' or '.join(FUNCTIONS)}"
            )
    for path, module in model.named_modules():
        cls = type(module)
        convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.RNNBase)
        if convolution or MIXERS.search(cls.__name__) or support.is_private(cls):
            raise Unsupported(
                f"context_parallel: {path} ({cls.__name__}) mixes tokens, and would mix this "
                "process's only"
            )
    for part in decoders(model):
        if getattr(part, "_is_stateful", False):
            raise Unsupported(
                f"context_parallel: {type(part).__name__} keeps a state along the sequence"
            )
        if "position_ids" not in arguments(type(part)):
            raise Unsupported(
                f"context_parallel: {type(part).__name__} takes no `position_ids`, so it would "
                "count positions from 0 on every process"
            )
    for config in support.configs(model):
        _check_config(config)


def _check_config(config) -> None:
    name = type(config).__name__
    if kinds := sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES):
        raise Unsupported(
            f"context_parallel: {name} has layers of types {', '.join(kinds)}; supported are "
            f"{', '.join(sorted(LAYER_TYPES))}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if each.get("rope_type") in VARYING_ROPE:
            raise Unsupported(
                f"context_parallel: {name} has rope_type={each['rope_type']!r}, whose frequencies "
                "depend on the largest position of a call, and so on the process"
            )
    for argument, wrong in (
        ("is_encoder_decoder", True),
        ("is_causal", False),
        ("use_bidirectional_attention", True),
        ("attn_temperature_tuning", True),  # llama4 counts positions itself
    ):
        if getattr(config, argument, None) is wrong:
            raise Unsupported(f"context_parallel: {name} has {argument}={wrong}")


def decoders(model: nn.Module) -> Iterator[nn.Module]:
    """Every model of transformers' in it that has attention."""
    return (part for part in support.models_of(model) if attention_modules(part))


def arguments(cls: type) -> list[str]:
    """Names of forward's arguments, without self."""
    return list(inspect.signature(cls.forward).parameters)[1:]
