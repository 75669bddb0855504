"""The division of weights, heads and rows over processes, as `accelerate launch` asks for it.

Its YAML files: recipes/accelerate/. Data parallel is torch's DDP; the weights are sharded (FSDP2)
and heads split (tensor parallel) by transformers' own plans while the checkpoint is read, so no
process ever holds a whole model and every architecture's plan knows where the per-query terms
belong.
"""

import os
import sys
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from transformers.distributed.configuration_utils import DistributedConfig

from hf_sigmoid.errors import BadInput

SERVED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
USE_FSDP, USE_SIZES = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"
USE_CPU = "ACCELERATE_USE_CPU"
# How many processes a launcher started, and which of them this is.
STARTED = {
    "WORLD_SIZE": "RANK", "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK", "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
}  # fmt: skip
TWO_ON_CPU = f"{USE_CPU}=true accelerate launch --multi_gpu --num_processes 2 ... starts two on CPU"


@dataclass(frozen=True)
class Division:
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
        """The division as transformers is told it; None: every process loads the whole model."""
        if not self.splits_weights:
            return None
        return DistributedConfig(
            tp_size=self.tensor,
            fsdp_size=self.shard * self.context,
            tp_plan="auto" if self.tensor > 1 else None,
            **({"dp_replicate_size": self.replicate} if self.replicate > 1 else {}),
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


def less_than_asked(accelerator: Accelerator) -> str:
    """The part of what the launch asked for that the run has not got, in words; or nothing."""
    used = accelerator.num_processes
    asked = max(number("SLURM_NTASKS"), *map(number, STARTED), _asked_of_accelerate())
    gpus = torch.cuda.device_count() if accelerator.device.type == "cuda" else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked > used:
        more = f"{asked} were" if asked < sys.maxsize else "more were"
        return f", though {more} asked for ({TWO_ON_CPU})"
    if gpus > used:
        return f", though there are {gpus} GPUs (accelerate launch --num_processes {gpus} ...)"
    if visible and accelerator.device.type == "cpu" and not is_set(USE_CPU):
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


def started() -> int:
    """The processes that a launcher has started."""
    return max([0, *(number(size) for size, rank in STARTED.items() if rank in os.environ)])


def number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0


def of_launch(accelerator: Accelerator) -> Division:
    """The layout that the launcher asks for.

    Raises:
        BadInput: one that would compute something else, or that is not served.
    """
    world, rank = accelerator.num_processes, accelerator.process_index
    kind, version = accelerator.distributed_type, os.environ.get("FSDP_VERSION", "1")
    fsdp, asked = is_set(USE_FSDP), is_set(USE_SIZES)
    sizes = ParallelismConfig() if asked else ParallelismConfig(1, 1, 1, 1, sp_size=1)
    context, tensor, shard = sizes.cp_size, sizes.tp_size, max(1, sizes.dp_shard_size)
    if fsdp and shard == 1:
        shard = max(1, world // (sizes.dp_replicate_size * context * tensor))
    replicate = max(1, world // (shard * context * tensor))
    refused = {
        "expected one process, DDP, FSDP2 or tensor parallelism, got accelerate's "
        f"{getattr(kind, 'value', kind)}": kind not in SERVED,
        f"accelerate's fsdp_version: expected 2, got {version}: version 1 flattens the per-query "
        "terms away": fsdp and version != "2",
        "fsdp_offload_params: expected false, got true: weights on the CPU are not served": fsdp
        and is_set("FSDP_OFFLOAD_PARAMS"),
        "fsdp_activation_checkpointing: expected false, got true: use train.gradient_"
        "checkpointing": fsdp and is_set("FSDP_ACTIVATION_CHECKPOINTING"),
        f"parallelism_config_sp_size: expected 1, got {sizes.sp_size}: Ulysses is of softmax "
        "kernels (parallelism_config_cp_size divides rows for sigmoid and "
        "ssmax)": sizes.sp_size > 1,
        f"parallelism_config_cp_size {context}: expected 1 with tp_size {tensor}: the two are not "
        "served together": context > 1 and tensor > 1,
        f"parallelism_config_dp_shard_size {shard}: expected FSDP2 beside it (distributed_type "
        "FSDP, fsdp_version 2), got a launch without": shard > 1 and not fsdp,
        f"expected as many processes as dp_shard {shard} × cp {context} × tp {tensor} (× copies), "
        f"got {world}": replicate * shard * context * tensor != world,
        f"parallelism_config_tp_size {tensor} on {world} processes: expected {tensor} processes, "
        "or FSDP2 beside it: copies of a split model are not kept "
        "equal": tensor > 1 and replicate > 1 and not fsdp,
    }
    if found := [said for said, wrong in refused.items() if wrong]:
        raise BadInput(found[0])
    return Division(rank, replicate, shard, context, tensor, fsdp)


def is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"
