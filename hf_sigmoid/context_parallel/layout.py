"""Tokens of one block by process, and the keys that each sees: masks of a context that is open."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_sigmoid import compat
from hf_sigmoid.context_parallel.gather import Gather, place, split
from hf_sigmoid.context_parallel.supported import arguments
from hf_sigmoid.support import Unsupported

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Contexts that are open: while there are none, masks are made as ever. No context variable: under
# gradient checkpointing autograd's own threads repeat the forward pass.
OPEN: list["Layout"] = []

# What an open context leaves on the attention modules of its model, and on the masks that it makes.
LAYOUT = "_hf_sigmoid_layout"

# Arguments of attention that say which keys a row sees, or add to logits, by local positions.
LOCAL = ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "indices")


class Layout:
    """Who holds which tokens of one block, and which keys each sees."""

    def __init__(self, group: "ProcessGroup | None", position_ids: Tensor, attentions, configs):
        self.group = group
        self.rank, self.size = place(group)
        _check_positions(position_ids, group, self.size)
        self.positions = split(position_ids, group)  # [B or 1, M]
        self.tokens = position_ids.shape[1]
        self.intervals = split(intervals(position_ids), group)  # [B or 1, M, 2]
        # By identity: modules have no other, and equal configs may be of different models.
        self.attentions = {id(module) for module in attentions}
        self.configs = {id(config) for config in configs}
        self.checked: Tensor | None = None  # comparing waits for a GPU: once for all inner models

    @torch.compiler.disable
    def check_call(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """A forward pre-hook: a call's arguments must be this process's part of the block."""
        given = {**dict(zip(arguments(type(model)), args, strict=False)), **kwargs}
        name = type(model).__name__
        for argument, why in (
            ("attention_mask", "rows may hold packed documents, and no padding"),
            ("cache", "it would hold this process's keys only"),
            ("past_key_values", "it would hold this process's keys only"),
            ("encoder_hidden_states", "cross attention is not split"),
        ):
            if given.get(argument) is not None:
                raise Unsupported(f"context_parallel: {name} is given `{argument}`: {why}")
        use_cache = given.get("use_cache")
        if getattr(model.config, "use_cache", False) if use_cache is None else use_cache:
            raise Unsupported(
                f"context_parallel: {name} is to fill a cache, which would hold this process's "
                "keys only: pass use_cache=False"
            )
        if given.get("labels") is not None and given.get("shift_labels") is None:
            raise Unsupported(
                f"context_parallel: {name} is given `labels`, which it shifts within this "
                "process's part: shift them first, then split, and compute the loss from logits"
            )
        positions = given.get("position_ids")
        if positions is None:
            raise ValueError(
                f"{name} must be given position_ids=split(position_ids, group): without them it "
                "counts positions from 0 on every process"
            )
        if positions is self.checked:
            return
        expected = self.positions
        rows = {*positions.shape[:1], expected.shape[0]} - {1}
        if positions.dim() != 2 or positions.shape[1] != expected.shape[1] or len(rows) > 1:
            raise ValueError(
                f"{name} must be given position_ids {list(expected.shape)}, this process's part of "
                f"the context's {self.tokens} tokens, got {list(positions.shape)}"
            )
        if not bool((positions == expected).all()):
            raise ValueError(
                f"{name} is given position_ids that are not part {self.rank} of the "
                f"{self.size} parts of the context's: pass split(position_ids, group)"
            )
        self.checked = positions

    @torch.compiler.disable
    def mask(
        self, batch: int, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int,
        mask_function: Callable, attention_mask: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Row intervals over all T keys, int64 `[B, 1, M, 2]`: what no other attention takes."""
        B, M, _ = self.intervals.shape
        if attention_mask is not None:
            raise Unsupported("context_parallel: a padding mask is not supported")
        if (q_length, kv_length) != (M, M) or int(q_offset) or kv_offset or B not in (1, batch):
            raise ValueError(
                f"a call within context_parallel must have {M} tokens of {B} rows, this process's "
                f"part of {self.tokens}, got {q_length} tokens of {batch} rows "
                f"and {kv_length} keys from {int(kv_offset)}"
            )
        lo, hi = self.intervals.unbind(-1)
        if (window := window_of(mask_function)) is not None:
            lo = torch.maximum(lo, hi - window)
        mask = torch.stack([lo, hi], -1).unsqueeze(1).expand(batch, 1, M, 2)
        setattr(mask, LAYOUT, self)
        return mask

    @torch.compiler.disable
    def whole(
        self,
        function: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        given: dict[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys `[B, G, T, D]` and values `[B, G, T, V]` of all processes, and row intervals.

        Raises:
            Unsupported: the module passes an argument that is about local positions only.
        """
        name = type(module).__name__
        for argument in LOCAL:
            if given.get(argument) is not None:
                raise Unsupported(
                    f"{function}: {name} passes `{argument}`, which context_parallel does not "
                    "support"
                )
        if mask is None or not is_marker(mask):
            form = "no mask" if mask is None else f"a mask {mask.dtype} {list(mask.shape)}"
            raise Unsupported(
                f"{function}: {name} passes {form} as `attention_mask` instead of the one of "
                "context_parallel: attention that is not causal, or with masks of its own, is not "
                "supported"
            )
        M, T = self.intervals.shape[1], self.tokens
        fits = query.shape[2] == key.shape[2] == value.shape[2] == mask.shape[2] == M
        if not fits or mask.shape[0] != query.shape[0]:
            raise Unsupported(
                f"{function}: {name} passes queries {list(query.shape)}, keys {list(key.shape)} "
                f"and mask {list(mask.shape)} within a context_parallel of {M} tokens a process: "
                "caches and cross attention are not supported"
            )
        both = Gather.apply(torch.cat([key, value], -1), self.group, T)
        key, value = both.split([key.shape[-1], value.shape[-1]], -1)
        return key, value, mask.to(torch.int32)


def layout_of(module: nn.Module, mask: Tensor | None) -> Layout | None:
    """The context that a call of attention belongs to, None if to none."""
    if mask is not None and is_marker(mask):
        return _layout_of_mask(module, mask)
    return getattr(module, LAYOUT, None)


def is_marker(mask: Tensor) -> bool:
    """Is this attention mask one of `Layout.mask`?"""
    return mask.dtype == torch.int64 and mask.dim() == 4 and mask.shape[-1] == 2


@torch.compiler.disable
def _layout_of_mask(module: nn.Module, mask: Tensor) -> Layout:
    """A pass that is repeated after its context has closed still has the mask made in it."""
    layout = getattr(mask, LAYOUT, None) or getattr(module, LAYOUT, None)
    if layout is None or id(module) not in layout.attentions:
        raise Unsupported(
            f"{type(module).__name__} gets a mask of a context_parallel that it is not in: one of "
            "another model, or one that closed before the backward pass that repeats this layer"
        )
    return layout


def mask_of(
    config, batch: int, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int,
    mask_function: Callable, attention_mask: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """The mask of the open context that a model with this config is in, None if it is in none."""
    for layout in OPEN:
        if id(config) in layout.configs:
            return layout.mask(
                batch, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask
            )
    return None


def _check_positions(position_ids: Tensor, group: "ProcessGroup | None", size: int) -> None:
    """Raise `ValueError`, on all processes together, if they do not hold the same positions."""
    if position_ids.dim() != 2 or position_ids.is_floating_point():
        raise ValueError(
            "position_ids must be int [B, T] of the whole block, got "
            f"{position_ids.dtype} {list(position_ids.shape)}"
        )
    flat = position_ids.long().flatten()
    places = torch.arange(flat.numel(), device=flat.device) % 1_000_003 + 1
    own = torch.stack([flat.new_tensor(position_ids.shape[0]), flat.new_tensor(flat.numel()),
                       (flat * places).sum()])  # fmt: skip
    everyones = own.new_empty(size, 3)
    compat.all_gather(everyones, own[None], group)
    if not bool((everyones == everyones[0]).all()):
        raise ValueError(
            "context_parallel needs the same rows on every process of the group, got different "
            f"position_ids (rows, tokens, checksum): {everyones.tolist()}"
        )


def intervals(position_ids: Tensor) -> Tensor:
    """Row intervals int64 `[B, T, 2]` of causal attention in the documents of `[B, T]` positions.

    A document ends where transformers sees an end: a position is not the one before plus 1.
    """
    B, T = position_ids.shape
    tokens = torch.arange(T, device=position_ids.device).expand(B, T)
    starts = torch.ones(B, T, dtype=torch.bool, device=position_ids.device)
    starts[:, 1:] = position_ids.diff(dim=1) != 1
    lo = torch.where(starts, tokens, 0).cummax(1).values
    return torch.stack([lo, tokens + 1], -1)


def window_of(mask_function: Callable) -> int | None:
    """The sliding window of one of transformers' causal mask functions, None if it has none.

    Raises:
        Unsupported: the function is not made of "causal", "sliding window" and "same document".
    """
    leaves = dict(_leaves(mask_function))
    if unknown := sorted(set(leaves) - {"causal", "window", "documents"}):
        raise Unsupported(f"context_parallel: a mask by {', '.join(unknown)} is not supported")
    if "causal" not in leaves:
        raise Unsupported("context_parallel: attention that is not causal is not supported")
    return leaves.get("window")


def _leaves(mask_function: Callable) -> Iterator[tuple[str, int | None]]:
    """The parts that a mask function of transformers.masking_utils intersects."""
    name = getattr(mask_function, "__qualname__", repr(mask_function)).split(".")[0]
    ours = getattr(mask_function, "__module__", "") == "transformers.masking_utils"
    cells = getattr(mask_function, "__closure__", None) or ()
    inside = dict(
        zip(getattr(mask_function, "__code__", _leaves.__code__).co_freevars,
            (cell.cell_contents for cell in cells), strict=False)
    )  # fmt: skip
    if not ours:
        yield f"{getattr(mask_function, '__module__', '')}.{name}", None
    elif name == "causal_mask_function":
        yield "causal", None
    elif name == "sliding_window_overlay":
        yield "window", inside["sliding_window"]
    elif name == "packed_sequence_mask_function":
        yield "documents", None
    elif name == "remap_positions_for_packed_sequence":
        yield from _leaves(inside["mask_function"])
    elif name == "and_masks":
        for each in inside["mask_functions"]:
            yield from _leaves(each)
    else:
        yield name, None
