"""The processes of a run: what they share, and what they say together."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from tqdm import tqdm

from hf_sigmoid.errors import BadInput
from hf_sigmoid.training import layout
from hf_sigmoid.training.sharding import transformers_shards

PATIENCE = timedelta(hours=6)  # of processes that wait for each other


@dataclass(frozen=True)
class Processes:
    """One process's view of all of them. Methods without a word are called by each."""

    accelerator: Accelerator
    layout: layout.Division
    context_group: Any = None  # those that share rows with this one

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def wait(self) -> None:
        self.accelerator.wait_for_everyone()

    def say(self, message: str) -> None:
        """Print a line once."""
        if self.main:
            tqdm.write(message, file=sys.stdout)

    def on_main(self, function: Callable[[], Any]) -> Any:
        """The main process's result on all of them, and its BadInput too."""
        if self.layout.world == 1:
            return function()
        result: list[Any] = [None, None]
        if self.main:
            try:
                result[0] = function()
            except BadInput as error:
                result[1] = str(error)
        torch.distributed.broadcast_object_list(result)
        if result[1] is not None:
            raise BadInput(result[1])
        return result[0]

    def total(self, *values: float, of_parts: bool = False) -> list[float]:
        """Values summed over the processes that read rows of their own, in float64.

        Processes that share rows have the same values, unless these are `of_parts` of the rows.
        """
        # On CPU first: some accelerators have no float64.
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.layout.world > 1:
            tensor = self.accelerator.reduce(tensor.to(self.device), "sum")
            tensor = tensor / (self.layout.tensor * (1 if of_parts else self.layout.context))
        return tensor.tolist()

    def everywhere(self, value: Any) -> list[Any]:
        """The values of every process, by rank."""
        if self.layout.world == 1:
            return [value]
        values: list[Any] = [None] * self.layout.world
        torch.distributed.all_gather_object(values, value)
        return values


def begin(precision: str, *, splits: bool = True, **options: Any) -> Processes:
    """The processes, as their launcher asks for them.

    Args:
        precision: "fp32", or "bf16" for autocast.
        splits: whether models whose weights are divided can be trained.
        options: more of Accelerator's.

    Raises:
        BadInput: a layout that would compute something else, or that is not served here.
    """
    # One process may train twice, with another precision.
    AcceleratorState._reset_state()
    local, gpus = layout.number("LOCAL_WORLD_SIZE"), torch.cuda.device_count()
    if torch.cuda.is_available() and not layout.is_set(layout.USE_CPU) and local > gpus:
        raise BadInput(
            f"the launcher started {local} processes here, each for a GPU of its own (num_processes"
            f" of recipes/accelerate/*.yaml), and there are {gpus}: expected as many"
        )
    # One process may prepare data, or write a checkpoint, for longer than the usual ten minutes.
    handlers = [
        InitProcessGroupKwargs(timeout=PATIENCE),
        DistributedDataParallelKwargs(gradient_as_bucket_view=True),
    ]
    kind = {"fp32": "no", "bf16": "bf16"}[precision]
    with transformers_shards():
        accelerator = Accelerator(mixed_precision=kind, kwargs_handlers=handlers, **options)
    started = layout.started()
    if started > accelerator.num_processes:
        raise BadInput(
            f"the launcher started {started} processes, each for a GPU of its own (num_processes "
            "of recipes/accelerate/*.yaml), and torch finds no GPU here, so that each would train "
            f"alone: expected a GPU for each, or one process; {layout.TWO_ON_CPU}"
        )
    found = layout.of_launch(accelerator)
    if (found.splits_weights or found.context > 1) and not splits:
        raise BadInput(f"this recipe runs on one process or data parallel, got {found} processes")
    return Processes(accelerator, found, found.context_group())


def leave_group() -> None:
    """A process that ends with the group's threads alive may abort after all its work is done.

    One that Ctrl-C ends does not wait for others, which may never come.
    """
    if torch.distributed.is_initialized() and sys.exc_info()[0] is not KeyboardInterrupt:
        torch.distributed.destroy_process_group()
