"""The loop around the steps of training and of distillation."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hf_sigmoid import files, fingerprints
from hf_sigmoid.errors import BadInput
from hf_sigmoid.loading import load_tokenizer, max_positions
from hf_sigmoid.run_lock import RunLock
from hf_sigmoid.training import checkpointing, corpus, parallel, resuming
from hf_sigmoid.training.packing import Packer, streams_of
from hf_sigmoid.training.run_log import finite
from hf_sigmoid.training.stop_signal import StopSignal

GO_ON = "the same command goes on from there"


def leave_group() -> None:
    """A process that ends with the group's threads alive may abort after all its work is done.

    One that Ctrl-C ends does not wait for others, which may never come.
    """
    if torch.distributed.is_initialized() and sys.exc_info()[0] is not KeyboardInterrupt:
        torch.distributed.destroy_process_group()


class Loop:
    """One run. A recipe adds `_not_finite()` (the name of a weight that is not, or None),
    `_write_checkpoint(folder)`, and its steps.
    """

    splits_weights = False  # whether the recipe trains models whose weights are divided

    def __init__(self, run: Any):
        self.run = run
        self.folder = Path(run.output_dir)
        self.checkpoints = self.folder / resuming.CHECKPOINTS
        self.final = self.folder / resuming.FINAL
        self.resumed: checkpointing.Checkpoint | None = None
        self.log = None
        self.stop = StopSignal()
        self.lock: RunLock | None = None

    def _begin(self, **options: Any) -> None:
        """The processes and the corpus."""
        files.check_folder(self.folder, "output_dir")
        self.accelerator, self.layout = parallel.begin(
            self.run.train.precision, splits=self.splits_weights, **options
        )
        self.ranks, self.rank = self.layout.data_ranks, self.layout.data_rank
        self.main = self.accelerator.is_main_process
        with self.accelerator.local_main_process_first():  # the others find what it has cached
            self.corpus = corpus.open_corpus(self.run.data)

    def _tokenize(self, source: str) -> None:
        """The tokenizer of a model, and whether it makes blocks of the corpus."""
        run = self.run
        positions = max_positions(source)
        if positions is not None and run.train.block_size > positions:
            raise BadInput(
                f"train.block_size: expected at most the model's {positions} positions "
                f"(max_position_embeddings), got {run.train.block_size}"
            )
        self.tokenizer = load_tokenizer(source)
        self.encode = corpus.encoder(self.tokenizer, run.data.append_eos)
        corpus.check_length(self.corpus, self.encode, run.train.block_size)

    def _find_checkpoint(self, *, fresh: bool = False) -> None:
        """The checkpoint to go on from unless the run is `fresh`, and the packer at its place."""
        run = self.run
        # Whether it is whole is read off its files, which one process may do for all.
        found = self._on_main(lambda: resuming.find(self.folder, run))
        self.resumed = None if fresh else found
        self.blocks_per_step = self.ranks * run.train.batch_size * run.train.grad_accumulation
        self.streams = self._streams()
        self.packer = Packer(
            self.corpus,
            self.encode,
            run.train.block_size,
            run.seed,
            streams=self.streams,
            mine=streams_of(self.rank, self.ranks, self.streams),
        )
        self.sources = self._sources()
        if self.resumed:
            resuming.check(
                self.resumed,
                run,
                blocks_per_step=self.blocks_per_step,
                corpus_sha256=self.corpus.fingerprint,
                streams=self.streams,
                layout=str(self.layout),
                sources=self.sources,
            )
            self.packer.load_state(self.resumed.manifest["packer"])

    def _streams(self) -> int:
        """Parts of the corpus that are packed alone, each by one process."""
        streams = self.run.data.streams
        if streams is None:
            # As many as the run began with: the number of processes may change, the text may not.
            streams = self.resumed.manifest["streams"] if self.resumed else self.ranks
        if streams % self.ranks or self.blocks_per_step % streams:
            raise BadInput(
                f"data.streams: expected a multiple of the {self.ranks} processes that read rows "
                f"which divides the {self.blocks_per_step} blocks of a step (processes × "
                f"train.batch_size × train.grad_accumulation), got {streams}"
            )
        return streams

    def _sources(self) -> dict[str, str]:
        """Fingerprints of what a checkpoint relies on without holding it."""
        return {"tokenizer": fingerprints.of_tokenizer(self.tokenizer)}

    def _on_main(self, function: Callable[[], Any]) -> Any:
        """What the main process finds, on all of them, and its BadInput too."""
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

    def _lock(self) -> None:
        """Make the folder and keep other runs out of it."""

        def lock() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = RunLock(self.folder)

        self._on_main(lock)

    def _is_finished(self) -> bool:
        finished = resuming.finished_steps(self.folder) == self.run.steps
        if finished:
            self._say(f"{self.final} is already there, after {self.run.steps} steps")
        return finished

    def _check_room(self, needed: int) -> None:
        """Refuse a disk that cannot hold what the run will write, before the work."""
        there = sum(p.stat().st_size for p in self.checkpoints.rglob("*") if p.is_file())
        needed -= there  # checkpoints that later ones take the place of
        parent = next(p for p in (self.folder, *self.folder.resolve().parents) if p.exists())
        if (free := shutil.disk_usage(parent).free) < needed:
            raise BadInput(
                f"output_dir {self.folder} needs {needed / 1e9:.2f} GB, there are "
                f"{free / 1e9:.2f} GB"
            )

    def _packers(self) -> dict[str, Any]:
        """The places of all processes' packers."""
        return merged(self._everywhere(self.packer.state()))

    def _save(self, step: int, **state: Any) -> None:
        """A checkpoint, with `state` in its manifest."""
        self._refuse_what_is_not_finite(step)
        packers = self._packers()
        if self.main:
            self.log.sync()
        checkpointing.save(
            self.checkpoints,
            step=step,
            keep=self.run.checkpoint.keep,
            fill=self._write_checkpoint,
            state={
                "packer": packers,
                "streams": self.streams,
                "blocks_per_step": self.blocks_per_step,
                "corpus_sha256": self.corpus.fingerprint,
                "layout": str(self.layout),
                "sources": self.sources,
                **finite(state),
            },
            main=self.main,
            wait=self.accelerator.wait_for_everyone,
        )
        self.accelerator.wait_for_everyone()

    def _refuse_what_is_not_finite(self, step: int) -> None:
        """End the run on every process if a step has ruined a weight on one of them."""
        ruined = [name for name in self._everywhere(self._not_finite()) if name]
        if ruined:
            raise FloatingPointError(
                f"step {step}: {ruined[0]} is not finite any more, and nothing was written. "
                + self._last_checkpoint(step)
            )

    def _last_checkpoint(self, done: int) -> str:
        """Where to go back to, for weights after `done` steps that cannot go on."""
        last = checkpointing.latest(self.checkpoints)
        if last is None:
            return f"There is no checkpoint in {self.checkpoints}"
        same = ", and holds the very weights that this step began with" if last.step >= done else ""
        return f"The last checkpoint is {last.folder}{same}"

    def _sum(self, *values: float, of_parts: bool = False) -> list[float]:
        """Values summed over the processes that read rows of their own, in float64.

        Processes that share rows have the same values, unless these are `of_parts` of the rows.
        """
        # On CPU first: some accelerators have no float64.
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.layout.world > 1:
            tensor = self.accelerator.reduce(tensor.to(self.accelerator.device), "sum")
            shared = self.layout.tensor * (1 if of_parts else self.layout.context)
            tensor = tensor / shared
        return tensor.tolist()

    def _everywhere(self, value: Any) -> list[Any]:
        """What every process has, by rank."""
        if self.layout.world == 1:
            return [value]
        values: list[Any] = [None] * self.layout.world
        torch.distributed.all_gather_object(values, value)
        return values

    def _asked_to_stop(self) -> bool:
        """Whether any process was sent a signal; all of them get the same answer."""
        return bool(self._sum(float(self.stop.asked))[0])

    def _stopped(self, how: str) -> bool:
        """False, after a word on how to go on.

        Raises:
            KeyboardInterrupt: with that word, if it was Ctrl-C that stopped the run.
        """
        if self.stop.interrupted:
            raise KeyboardInterrupt(f"interrupted; {how}")
        self._say(f"stopped by a signal; {how}")
        return False

    def _say(self, message: str) -> None:
        if self.main:
            tqdm.write(message, file=sys.stdout)


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Dictionaries of different keys in one, whose order does not depend on the parts'."""
    together = {key: value for part in parts for key, value in part.items()}
    return dict(sorted(together.items(), key=lambda item: int(item[0])))
