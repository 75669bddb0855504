"""One block's tokens split over processes, and the keys and values of all of them gathered."""

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from hf_sigmoid import compat

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def split(tensor: Tensor, group: "ProcessGroup | None" = None, dim: int = 1) -> Tensor:
    """This process's part of the tokens: T/R consecutive ones, in the order of the ranks.

    Args:
        tensor: `[B, T, ...]`, the same on every process of the group: ids, positions, labels that
            are shifted already (the last token of a part is asked for the first of the next).
        group: the R processes that share each row; None is all there are.
        dim: the dimension of the tokens.

    Returns:
        `[B, T/R, ...]`, a view.

    Raises:
        ValueError: T is not a multiple of R.
    """
    rank, size = place(group)
    if tensor.shape[dim] % size:
        raise ValueError(
            f"tokens must divide evenly among the processes, got {tensor.shape[dim]} tokens "
            f"(dimension {dim} of {list(tensor.shape)}) and {size} processes"
        )
    return tensor.chunk(size, dim)[rank]


def place(group: "ProcessGroup | None") -> tuple[int, int]:
    """Rank in the group, and its size."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not a member of the group given to context_parallel")
    return rank, dist.get_world_size(group)


class Gather(Function):
    """`[B, G, M, E]` of every process, one after the other: `[B, G, T, E]`.

    Its adjoint sums everybody's gradients of the own part.
    """

    @staticmethod
    def forward(ctx, part: Tensor, group: "ProcessGroup | None", tokens: int) -> Tensor:
        ctx.group, ctx.length = group, part.shape[2]
        # Tokens first: then the parts lie in memory as the whole does, and nothing is moved.
        part = part.permute(2, 0, 1, 3).contiguous()
        whole = part.new_empty(tokens, *part.shape[1:])
        compat.all_gather(whole, part, group)
        return whole.permute(1, 2, 0, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.permute(2, 0, 1, 3).contiguous()
        part = gradient.new_empty(ctx.length, *gradient.shape[1:])
        compat.reduce_scatter(part, gradient, ctx.group)
        return part.permute(1, 2, 0, 3), None, None
