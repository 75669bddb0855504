"""Another attention function for a while: to record a model's calls, to probe it, to show weights.

transformers reads the function's name off each config at every call. Setting it through
`set_attn_implementation` would change the section of a converted model, so the private name is
set, here alone.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from transformers.configuration_utils import PreTrainedConfig

STAND_IN = "hf_sigmoid_stand_in"


def use(configs: Iterable[PreTrainedConfig], name: str) -> list[tuple[PreTrainedConfig, str]]:
    """Let the models of these configs call the function of a name; what `give_back` takes."""
    before = [(config, config._attn_implementation_internal) for config in configs]
    give_back((config, name) for config, _ in before)
    return before


def give_back(names: Iterable[tuple[PreTrainedConfig, str]]) -> None:
    """Let each config name the function beside it."""
    for config, name in names:
        config._attn_implementation_internal = name


@contextmanager
def replaced(configs: Iterable[PreTrainedConfig], name: str) -> Iterator[None]:
    """While it lasts the models of these configs call the attention function of a name."""
    before = use(configs, name)
    try:
        yield
    finally:
        give_back(before)


@contextmanager
def standing_in(
    configs: Iterable[PreTrainedConfig], attention: Callable, mask: Callable | None = None
) -> Iterator[None]:
    """While it lasts the models of these configs call `attention`, with masks that `mask` makes.

    One at a time: the name is one for all.
    """
    # Late: this module loads while transformers' own may be half loaded.
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(STAND_IN, attention)
    if mask is not None:
        AttentionMaskInterface.register(STAND_IN, mask)
    try:
        with replaced(configs, STAND_IN):
            yield
    finally:
        AttentionInterface._global_mapping.pop(STAND_IN)
        AttentionMaskInterface._global_mapping.pop(STAND_IN, None)
