"""The processes of a run: how they divide weights, heads and rows.

`accelerate launch` says it (its YAML files: recipes/accelerate/). Data parallel is torch's DDP; the
weights are sharded (FSDP2) and heads split (tensor parallel) by transformers' own plans while the
checkpoint is read, so no process ever holds a whole model and every architecture's plan knows
where the attention row numbers belong.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
)
from transformers.distributed.configuration_utils import DistributedConfig

from hf_sigmoid.errors import BadInput

PATIENCE = timedelta(hours=6)  # of processes that wait for each other
SERVED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_FSDP, _SIZES = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"
_OFFLOAD, _RECOMPUTE = "FSDP_OFFLOAD_PARAMS", "FSDP_ACTIVATION_CHECKPOINTING"
_CPU = "ACCELERATE_USE_CPU"
# How many processes a launcher started, and which of them this is.
STARTED = {
    "WORLD_SIZE": "RANK", "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK", "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
}  # fmt: skip
TWO_ON_CPU = f"{_CPU}=true accelerate launch --multi_gpu --num_processes 2 ... starts two on CPU"


@dataclass(frozen=True)
class Layout:
    """The sizes of each way to divide, their product the number of processes; tensor innermost."""

    rank: int = 0
    replicate: int = 1  # copies of the model
    shard: int = 1  # FSDP2: processes that share one copy and read rows of their own
    context: int = 1  # processes that share the tokens of their rows, and with FSDP2 the copy too
    tensor: int = 1  # processes that share every layer's heads and features
    fsdp: bool = False

    @property
    def world(self) -> int:
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def data_ranks(self) -> int:
        """Groups of processes that read rows of their own."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        return self.rank // (self.context * self.tensor)

    @property
    def averaged(self) -> int:
        """Processes over which DDP or FSDP2 averages gradients."""
        return self.world // self.tensor

    @property
    def averaged_rank(self) -> int:
        return self.rank // self.tensor

    def context_group(self) -> Any:
        """The processes that share rows with this one; every process must ask."""
        if self.context == 1:
            return None
        own = None
        for first in range(0, self.world, self.context):
            group = torch.distributed.new_group(range(first, first + self.context))
            own = group if first <= self.rank < first + self.context else own
        return own

    @property
    def splits_weights(self) -> bool:
        return self.fsdp or self.tensor > 1

    def distributed_config(self) -> DistributedConfig | None:
        """What transformers is told; None: every process loads the whole model."""
        if not self.splits_weights:
            return None
        return DistributedConfig(
            tp_size=self.tensor,
            fsdp_size=self.shard * self.context,
            dp_replicate_size=self.replicate,
            tp_plan="auto" if self.tensor > 1 else None,
        )

    def __str__(self) -> str:
        if self.world == 1:
            return "one process"
        sizes = {
            "copies": self.replicate, "FSDP2": self.shard if self.fsdp else 1,
            "context": self.context, "tensor": self.tensor,
        }  # fmt: skip
        sizes = {name: size for name, size in sizes.items() if size > 1}
        if sizes.keys() == {"copies"}:
            return f"data parallel on {self.world} processes"
        return " × ".join(f"{name} {size}" for name, size in sizes.items())


def begin(precision: str, *, splits: bool = True, **options: Any) -> tuple[Accelerator, Layout]:
    """The accelerator, and the layout that its launcher asks for.

    Args:
        precision: "fp32", or "bf16" for autocast.
        splits: whether this recipe can train a model whose weights are divided.
        options: more of Accelerator's.

    Raises:
        BadInput: a layout that would compute something else, or that is not served here.
    """
    # One process may train twice, with another precision.
    AcceleratorState._reset_state()
    local = _number("LOCAL_WORLD_SIZE")
    if torch.cuda.is_available() and not _is_set(_CPU) and local > torch.cuda.device_count():
        raise BadInput(
            f"the launcher started {local} processes here, each for a GPU of its own (num_processes"
            f" of recipes/accelerate/*.yaml), and there are {torch.cuda.device_count()}: expected "
            "as many"
        )
    # One process may prepare data, or write a checkpoint, for longer than the usual ten minutes.
    handlers = [
        InitProcessGroupKwargs(timeout=PATIENCE),
        DistributedDataParallelKwargs(gradient_as_bucket_view=True),
    ]
    with transformers_shards():
        accelerator = Accelerator(
            mixed_precision={"fp32": "no", "bf16": "bf16"}[precision],
            kwargs_handlers=handlers,
            **options,
        )
    started = max([0, *(_number(size) for size, rank in STARTED.items() if rank in os.environ)])
    if started > accelerator.num_processes:
        raise BadInput(
            f"the launcher started {started} processes, each for a GPU of its own (num_processes "
            "of recipes/accelerate/*.yaml), and torch finds no GPU here, so that each would train "
            f"alone: expected a GPU for each, or one process; {TWO_ON_CPU}"
        )
    layout = _layout(accelerator)
    if (layout.splits_weights or layout.context > 1) and not splits:
        raise BadInput(f"this recipe runs on one process or data parallel, got {layout} processes")
    return accelerator, layout


def less_than_asked(accelerator: Accelerator) -> str:
    """What the launch asked for and the run has not got, to be added to what it has; or nothing."""
    used = accelerator.num_processes
    asked = max(_number("SLURM_NTASKS"), *map(_number, STARTED), _asked_of_accelerate())
    gpus = torch.cuda.device_count() if accelerator.device.type == "cuda" else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked > used:
        more = f"{asked} were" if asked < sys.maxsize else "more were"
        return f", though {more} asked for ({TWO_ON_CPU})"
    if gpus > used:
        return f", though there are {gpus} GPUs (accelerate launch --num_processes {gpus} ...)"
    if visible and accelerator.device.type == "cpu" and not _is_set(_CPU):
        return f", though a GPU was asked for (CUDA_VISIBLE_DEVICES={visible}): torch finds none"
    return ""


def _asked_of_accelerate() -> int:
    """The processes that `accelerate launch` was asked for where it started one without a word.

    It tells its one process of them by nothing but an address to meet the others at, so their
    number is read off its command line; sys.maxsize if it is not there.
    """
    if "MASTER_ADDR" not in os.environ or "RANK" in os.environ:
        return 0
    try:
        from accelerate.commands.config import default_config_file, load_config_from_file
        from accelerate.commands.launch import launch_command_parser

        words = psutil.Process().parent().cmdline()
        behind = next(i for i, word in enumerate(words) if word.endswith(("launch", "launch.py")))
        given, _ = launch_command_parser().parse_known_args(words[behind + 1 :])
        if given.num_processes is not None:
            return given.num_processes
        return load_config_from_file(given.config_file or default_config_file).num_processes
    except (Exception, SystemExit):  # of another platform, launcher or release of accelerate
        return sys.maxsize


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0


def _layout(accelerator: Accelerator) -> Layout:
    world, rank = accelerator.num_processes, accelerator.process_index
    if accelerator.distributed_type not in SERVED:
        raise BadInput(
            "expected one process, DDP, FSDP2 or tensor parallelism, got accelerate's "
            f"{accelerator.distributed_type.value}"
        )
    fsdp = _is_set(_FSDP)
    if fsdp and os.environ.get("FSDP_VERSION", "1") != "2":
        raise BadInput(
            "accelerate's fsdp_version: expected 2, got "
            f"{os.environ.get('FSDP_VERSION', '1')}: version 1 flattens the row numbers away"
        )
    if fsdp and _is_set(_OFFLOAD):
        raise BadInput(
            "fsdp_offload_params: expected false, got true: weights on the CPU are not served"
        )
    if fsdp and _is_set(_RECOMPUTE):
        raise BadInput(
            "fsdp_activation_checkpointing: expected false, got true: use "
            "train.gradient_checkpointing"
        )
    asked = _is_set(_SIZES)
    sizes = ParallelismConfig() if asked else ParallelismConfig(1, 1, 1, 1, sp_size=1)
    if sizes.sp_size > 1:
        raise BadInput(
            f"parallelism_config_sp_size: expected 1, got {sizes.sp_size}: Ulysses is of softmax "
            "kernels (parallelism_config_cp_size divides rows for sigmoid and ssmax)"
        )
    context, tensor = sizes.cp_size, sizes.tp_size
    if context > 1 and tensor > 1:
        raise BadInput(
            f"parallelism_config_cp_size {context}: expected 1 with tp_size {tensor}: the two are "
            "not served together"
        )
    shard = sizes.dp_shard_size if asked and sizes.dp_shard_size > 1 else 1
    if fsdp and shard == 1:
        shard = max(1, world // (sizes.dp_replicate_size * context * tensor))
    if shard > 1 and not fsdp:
        raise BadInput(
            f"parallelism_config_dp_shard_size {shard}: expected FSDP2 beside it (distributed_type "
            "FSDP, fsdp_version 2), got a launch without"
        )
    replicate = max(1, world // (shard * context * tensor))
    if replicate * shard * context * tensor != world:
        raise BadInput(
            f"expected as many processes as dp_shard {shard} × cp {context} × tp {tensor} "
            f"(× copies), got {world}"
        )
    if tensor > 1 and replicate > 1 and not fsdp:
        raise BadInput(
            f"parallelism_config_tp_size {tensor} on {world} processes: expected {tensor} "
            "processes, or FSDP2 beside it: copies of a split model are not kept equal"
        )
    return Layout(rank, replicate, shard, context, tensor, fsdp)


@contextmanager
def transformers_shards() -> Iterator[None]:
    """Hide the launcher's wish for shards from accelerate, which would do it a second time.

    And from `from_pretrained`, which would leave all but one process without weights then, for
    accelerate to send them later.
    """
    hidden = {name: os.environ.pop(name) for name in (_FSDP, _SIZES) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


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
            for group in state._fsdp_param_groups:
                for record in group.fsdp_params:
                    places[record._module_info.module] = (record, group)
        (owner, _), (stray, group) = places[embedding], places[head]
        group.fsdp_params.remove(stray)
        owner._module_info.shared_modules.append(head)
        owner._module_info.shared_param_names.append("weight")
        for state in states:
            if not group.fsdp_params and group in state._fsdp_param_groups:
                state._fsdp_param_groups.remove(group)
    except (AttributeError, KeyError) as error:
        raise BadInput(
            f"{type(model).__name__} ties its embeddings, which this release of torch does not "
            f"let FSDP2 share ({type(error).__name__}: {error}): use DDP"
        ) from error


def norm_and_clip(accelerator: Accelerator, parameters: list, limit: float) -> float:
    """The norm of all gradients, wherever they are, clipped to the limit."""
    return float(whole(accelerator.clip_grad_norm_(parameters, limit)))
