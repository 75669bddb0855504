"""What training and distillation have in common around their steps."""

import sys
from pathlib import Path
from typing import Any

import checkpointing
import corpus
import resuming
import torch
from errors import BadInput
from loading import data_parallel, load, max_positions
from packing import Packer
from tqdm import tqdm
from transformers import AutoTokenizer


def leave_group() -> None:
    """A process that ends with the group's threads alive may abort after all its work is done."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Loop:
    """One run. A recipe adds `_check_finite(step)`, `_write_checkpoint(folder)`, and its steps."""

    def __init__(self, run: Any):
        self.run = run
        self.folder = Path(run.output_dir)
        self.checkpoints = self.folder / resuming.CHECKPOINTS
        self.final = self.folder / resuming.FINAL
        self.resumed: checkpointing.Checkpoint | None = None
        self.log = None

    def _begin(self, *, fresh: bool = False) -> None:
        """The corpus, the processes, and the checkpoint to go on from unless the run is `fresh`."""
        run = self.run
        self.resumed = None if fresh else resuming.find(self.folder, run)
        self.documents = corpus.documents(run.data.path, run.data.field)
        self.accelerator = data_parallel(run.train.precision)
        self.ranks, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        self.blocks_per_step = self.ranks * run.train.batch_size * run.train.grad_accumulation
        self.corpus_sha256 = corpus.fingerprint(self.documents)
        if self.resumed:
            resuming.check(
                self.resumed,
                run,
                blocks_per_step=self.blocks_per_step,
                corpus_sha256=self.corpus_sha256,
            )

    def _is_finished(self) -> bool:
        finished = resuming.finished_steps(self.folder) == self.run.steps
        if finished:
            self._say(f"{self.final} is already there, after {self.run.steps} steps")
        return finished

    def _pack(self, source: str) -> None:
        """The tokenizer of a model, and its blocks of the corpus."""
        run = self.run
        positions = max_positions(source)
        if positions is not None and run.train.block_size > positions:
            raise BadInput(
                f"train.block_size: expected at most the model's {positions} positions "
                f"(max_position_embeddings), got {run.train.block_size}"
            )
        self.tokenizer = load(AutoTokenizer, source)
        encode = corpus.encoder(self.tokenizer, run.data.append_eos)
        corpus.check_length(self.documents, encode, run.train.block_size)
        self.packer = Packer(self.documents, encode, run.train.block_size, run.seed)

    def _save(self, step: int, **state: Any) -> None:
        """A checkpoint, with `state` in its manifest."""
        self._check_finite(step)
        if self.accelerator.is_main_process:
            self.log.sync()
            checkpointing.save(
                self.checkpoints,
                step=step,
                keep=self.run.checkpoint.keep,
                fill=self._write_checkpoint,
                state={
                    "packer": self.packer.state(),
                    "blocks_per_step": self.blocks_per_step,
                    "corpus_sha256": self.corpus_sha256,
                    **state,
                },
            )
        self.accelerator.wait_for_everyone()

    def _sum(self, *values: float) -> list[float]:
        """Values summed over the processes, in float64."""
        # On CPU first: some accelerators have no float64.
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.ranks > 1:
            tensor = self.accelerator.reduce(tensor.to(self.accelerator.device), "sum")
        return tensor.tolist()

    def _say(self, message: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(message, file=sys.stdout)
