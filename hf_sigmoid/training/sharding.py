"""Models of which every process holds a part, or a copy whose gradients are averaged."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator

from hf_sigmoid.compat import forget_fsdp_group, fsdp_groups
from hf_sigmoid.errors import BadInput
from hf_sigmoid.training.layout import USE_FSDP, USE_SIZES


@contextmanager
def transformers_shards() -> Iterator[None]:
    """Hide the launcher's wish for shards from accelerate, which would do it a second time.

    And from `from_pretrained`, which would leave all but one process without weights then, for
    accelerate to send them later.
    """
    hidden = {name: os.environ.pop(name) for name in (USE_FSDP, USE_SIZES) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of which each process may hold a part; every process must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of it that is here."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextmanager
def without_reduction(model: Any, *, last: bool) -> Iterator[None]:
    """Backward passes whose gradients stay here until the `last` one of a step."""
    if last:
        yield
    elif hasattr(model, "no_sync"):  # DDP
        with model.no_sync():
            yield
    elif hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield


def tie_again(model: Any) -> None:
    """Let the output embedding read the input embedding's shards where the two are one weight.

    transformers 5.24 shards a model before it ties its weights. The head keeps shards of its own
    then, which are read and never updated: the model would train on a head that stands still.

    Raises:
        BadInput: FSDP2 does not let itself be told, or the two are still two.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    places: dict[Any, tuple[Any, Any]] = {}  # module of a weight -> its record, and their group
    try:
        states = [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]
        for state in states:
            for group in fsdp_groups(state):
                for record in group.fsdp_params:
                    places[record._module_info.module] = (record, group)
        (owner, _), (stray, group) = places[embedding], places[head]
        group.fsdp_params.remove(stray)
        owner._module_info.shared_modules.append(head)
        owner._module_info.shared_param_names.append("weight")
        for state in states:
            if not group.fsdp_params and group in fsdp_groups(state):
                forget_fsdp_group(state, group)
    except (AttributeError, KeyError) as error:
        raise BadInput(
            f"{type(model).__name__} ties its embeddings, which this release of torch does not "
            f"let FSDP2 share ({type(error).__name__}: {error}): use DDP"
        ) from error


def norm_and_clip(accelerator: Accelerator, parameters: list, limit: float) -> float:
    """The norm of all gradients, wherever they are, clipped to the limit."""
    return float(whole(accelerator.clip_grad_norm_(parameters, limit)))
