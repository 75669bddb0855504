"""The rows of query and key heads in what this process holds of them, whoever split the weights.

A row (an output feature) belongs to one head's block, but a process may hold half of a head's rows
(`Shard(0)`), or half of every row (`Shard(1)`), or both. So rows keep their numbers in the whole
weight, and what is summed over a head is summed over what is here, then over the processes that
hold other parts: one small vector for all heads of a model.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_sigmoid import compat, parameters
from hf_sigmoid.logit_control.blocks import Heads, Matrix


class Rows:
    """One vector with a place for each head of each matrix, and the rows that belong to it.

    Its methods are collective: every process that holds a part of the model must call them.
    """

    def __init__(self, heads: Heads):
        self.heads = heads
        self.matrices = [matrix for block in heads.blocks.values() for matrix in block.values()]
        self._parameters: list[Tensor] = []
        self._splits: list = []

    def refresh(self) -> None:
        """Look at the parameters again: wrappers put others into their modules."""
        reshard(self.heads.model)
        projections = list({id(m.projection): m.projection for m in self.matrices}.values())
        found = [p.weight for p in projections] + [p.bias for p in projections]
        splits = [None if p is None else _split(p) for p in found]
        same = list(map(id, found)) == list(map(id, self._parameters))
        if same and splits == self._splits:
            return
        self._parameters, self._splits = found, splits
        self.weights, self.biases = [], []
        for kind, start in ((self.weights, 0), (self.biases, len(projections))):
            alike: dict = {}
            for number, projection in enumerate(projections, start):
                if found[number] is not None:
                    alike.setdefault(splits[number], []).append((projection, found[number]))
            kind.extend(_Group(self.matrices, group, not start) for group in alike.values())

    def sums(self) -> Tensor:
        """Sum of the squares of each head's block, `[places]`."""
        sums = [group.sums() for group in self.weights]
        return sum(each.to(sums[0].device) for each in sums)

    def spread(self, values: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """`values` `[places]` at the rows of every parameter; 1 where no head is.

        Returns:
            Parameter, what of it is here (its storage), and a vector that broadcasts to that.
        """
        return [each for group in self.weights + self.biases for each in group.spread(values)]

    def per_matrix(self, values: Tensor) -> dict[str, dict[str, Tensor]]:
        """`[places]` by attention module and matrix, `[heads]` each."""
        parts = iter(values.split([matrix.heads for matrix in self.matrices]))
        return {
            name: {key: next(parts) for key in block} for name, block in self.heads.blocks.items()
        }


def reshard(model: nn.Module) -> None:
    """Let go of the weights that FSDP2 keeps gathered.

    After a forward pass without a backward one they stand in the place of the sharded ones, which
    optimisers and checkpoints mean; after a step they are the old ones.
    """
    if dist.is_available() and dist.is_initialized():
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def head_part(module: nn.Module, here: int) -> tuple[int, slice, dist.ProcessGroup | None]:
    """The part of an attention module's heads that this process computes, `here` of them.

    Returns:
        How many it has in all, which of them are here, and the processes that have the others
        (None: there are no others).

    Raises:
        ValueError: fewer than it has, and tensor parallelism does not split them evenly.
    """
    mesh = compat.mesh_of(module)
    if mesh is None or here == (heads := parameters.head_count(module)):
        return here, slice(0, here), None
    names = mesh.mesh_dim_names or ()
    dimension = names.index("tp") if "tp" in names else mesh.ndim - 1
    if mesh.size(dimension) * here != heads:
        raise ValueError(
            f"{type(module).__name__}: expected {heads} heads, or the equal part of each process "
            f"of tensor parallelism, got {here}"
        )
    first = mesh.get_local_rank(dimension) * here
    return heads, slice(first, first + here), mesh.get_group(dimension)


class _Group:
    """Parameters of one device that are split alike: a few operations serve all of them."""

    def __init__(
        self, matrices: list[Matrix], members: list[tuple[nn.Module, Tensor]], is_weight: bool
    ):
        self.parameters = [parameter for _, parameter in members]
        self.axes, self.sizes = [], []
        rows_here, places = [], []
        for projection, parameter in members:
            first = axis = 0
            rows = None
            for matrix in matrices:
                if matrix.projection is projection:
                    if rows is None:
                        axis = matrix.dimension if is_weight else 0
                        rows = _rows(parameter, axis)
                    head = matrix.head[rows]
                    known = (head >= 0).nonzero().flatten()
                    rows_here.append(sum(self.sizes) + known)
                    places.append(first + head[known])
                first += matrix.heads
            self.axes.append(axis)
            self.sizes.append(len(rows))
        device = _local(self.parameters[0]).device
        # Rows of a head side by side, to be summed in one order: on a GPU index_add_ would sum in
        # any, and replicas of a model would drift apart.
        places, order = torch.cat(places).sort(stable=True)
        self.rows, self.places = torch.cat(rows_here)[order].to(device), places.to(device)
        self.lengths = torch.bincount(places, minlength=sum(m.heads for m in matrices)).to(device)

    @torch.no_grad()
    def sums(self) -> Tensor:
        squares = torch.cat(
            [
                torch.linalg.vector_norm(local, dim=1 - axis, dtype=_accurate(local)).square()
                for local, axis in zip(map(_local, self.parameters), self.axes, strict=True)
            ]
        )
        sums = torch.segment_reduce(squares[self.rows], "sum", lengths=self.lengths, unsafe=True)
        if (mesh := getattr(self.parameters[0], "device_mesh", None)) is None:
            return sums
        total = sums.to(mesh.device_type)  # weights may be offloaded, messages are not
        for dimension, placement in enumerate(self.parameters[0].placements):
            if not placement.is_replicate():
                dist.all_reduce(total, group=mesh.get_group(dimension))
        return total.to(sums.device)

    @torch.no_grad()
    def spread(self, values: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        all_rows = values.new_ones(sum(self.sizes)).to(self.rows.device)
        all_rows[self.rows] = values.to(self.rows.device)[self.places]
        parts = zip(self.parameters, self.axes, all_rows.split(self.sizes), strict=True)
        return [
            (
                parameter,
                _local(parameter),
                part[:, None] if not axis and parameter.dim() > 1 else part,
            )
            for parameter, axis, part in parts
        ]


def _rows(parameter: Tensor, axis: int) -> Tensor:
    """The numbers, in the whole parameter, of the rows along `axis` that are here."""
    numbers = torch.arange(parameter.shape[axis], device="cpu")
    if (mesh := getattr(parameter, "device_mesh", None)) is None:
        return numbers
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    # A vector of numbers, cut as the rows are: strided shards of two-dimensional meshes included.
    placements = []
    for placement in parameter.placements:
        if placement.is_partial():
            raise ValueError(f"expected weights in shards or whole, got {placement}")
        if getattr(placement, "dim", None) == axis:
            strided = getattr(placement, "split_factor", None)
            placement = Shard(0) if strided is None else type(placement)(0, split_factor=strided)
        else:
            placement = Replicate()
        placements.append(placement)
    numbers = distribute_tensor(numbers, mesh, placements, src_data_rank=None).to_local().cpu()
    assert len(numbers) == _local(parameter).shape[axis], "rows of a shard"
    return numbers


def _split(parameter: Tensor) -> tuple:
    """Device and, of a DTensor, how it is split."""
    return (
        parameter.device,
        getattr(parameter, "device_mesh", None),
        getattr(parameter, "placements", None),
    )


def _local(parameter: Tensor) -> Tensor:
    """The storage of what is here, without a gradient."""
    with torch.no_grad():
        return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()


def _accurate(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
