"""The processes that share an evaluation, as `accelerate launch` and `torchrun` start them."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """This process among `size`."""

    rank: int = 0
    size: int = 1

    @classmethod
    def find(cls) -> "World":
        """From the launcher's environment; alone without one."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            # Nothing but waiting for each other, for as long as the slowest takes.
            dist.init_process_group("gloo", timeout=timedelta(days=7))
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def device(self, asked: str) -> str:
        """The process's own GPU, if the evaluation runs on GPUs."""
        if asked != "cuda" or self.size == 1:
            return asked
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"

    def wait(self) -> None:
        """For all processes to come here."""
        if self.size > 1:
            dist.barrier()
