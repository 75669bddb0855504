"""Context parallelism: each process holds a part of every row's tokens, and the keys are gathered.

    process r of R holds tokens i in [r T/R, (r + 1) T/R) of a block of T
    query i sees keys [lo_i, i + 1),  lo_i the start of its document, or i + 1 − W if that is later
    n_i = i + 1 − lo_i

K and V are all-gathered along the sequence (their gradients are reduce-scattered back), so a query
is given every key that it sees in one process, and log n is that of true positions. Nothing else
mixes tokens in the models that are let in. A layer holds K and V of whole rows while it runs and,
without gradient checkpointing, until its backward pass; all other activations are split.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hf_sigmoid import support
from hf_sigmoid.context_parallel.gather import split
from hf_sigmoid.context_parallel.layout import LAYOUT, OPEN, Layout
from hf_sigmoid.context_parallel.supported import check_model, decoders
from hf_sigmoid.parameters import attention_modules

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["check_model", "context_parallel", "split"]


@contextlib.contextmanager
def context_parallel(
    model: nn.Module, group: "ProcessGroup | None", position_ids: Tensor
) -> Iterator[None]:
    """While open, calls of the model get this process's part of a block and see all of its keys.

        with context_parallel(model, group, position_ids):
            logits = model(
                input_ids=split(ids, group), position_ids=split(position_ids, group),
                use_cache=False,
            ).logits                                                     # [B, T/R, vocabulary]
            loss = cross_entropy(logits.flatten(0, 1), split(shifted, group).flatten(),
                                 reduction="sum")
            loss.backward()

    Every process of the group must make the same calls, backward passes included. The sums over
    the group of losses and gradients are those of one process with whole rows; what averages
    gradients (DDP, FSDP2) needs the loss times the number of processes it averages over. The
    backward pass may also run after the context has closed, gradient checkpointing included,
    unless the model hands its mask to a checkpointed layer as a positional argument: that raises.

    Supported are causal decoders with full or sliding-window attention, packed documents, soft
    caps, ssmax's sinks, dropout (drawn by each process for its rows) and layers that a conversion
    left softmax. What else mixes tokens cannot always be recognised: a module that is neither on
    transformers' attention interface nor of a known kind must not, and statistics over the tokens
    of a call (a router's balancing loss) are those of this process's part.

    Args:
        model: it, or what wraps it (DDP, PEFT); all its attention runs "sigmoid" or "ssmax".
        group: the R processes that share each row; None is all there are.
        position_ids: int `[B, T]` or `[1, T]` of the whole block, the same on all of them. A
            document starts where a position is not the one before plus 1, and sees no other: also
            in the families (afmoe, gpt_oss, opt) that without cu_seq_lens would let it.

    Raises:
        Unsupported: some part of the model would compute something else, or a call passes an
            argument that is not honoured: a padding mask, a cache, labels, ALiBi, ...
        ValueError: position_ids do not divide evenly, differ between the processes or are not the
            ones of a call; or a context of this model is open already.
    """
    attentions = [module for _, module in attention_modules(model)]
    if any(hasattr(module, LAYOUT) for module in attentions):
        raise ValueError(f"{type(model).__name__} is in a context_parallel already")
    check_model(model)
    device = next((each.device for each in model.parameters()), position_ids.device)
    layout = Layout(group, position_ids.to(device), attentions, support.configs(model))
    hooks = []
    try:
        for part in decoders(model):
            hooks.append(part.register_forward_pre_hook(layout.check_call, with_kwargs=True))
        for module in attentions:
            setattr(module, LAYOUT, layout)
        OPEN.append(layout)
        yield
    finally:
        if layout in OPEN:
            OPEN.remove(layout)
        for module in attentions:
            vars(module).pop(LAYOUT, None)
        for hook in hooks:
            hook.remove()
