"""One run: its keys, processes, folder and text, and the checkpoint that it goes on from."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from hf_sigmoid import fingerprints
from hf_sigmoid.errors import BadInput
from hf_sigmoid.loading import fingerprint, load_tokenizer, max_positions
from hf_sigmoid.training import packing, run_folder
from hf_sigmoid.training.checkpointing import Checkpoint
from hf_sigmoid.training.corpus import Corpus, check_length, encoder, open_corpus
from hf_sigmoid.training.lookups import LookupBlocks
from hf_sigmoid.training.processes import Processes
from hf_sigmoid.training.run_folder import RunFolder
from hf_sigmoid.training.run_keys import Distil, Run
from hf_sigmoid.training.stop_signal import StopSignal


@dataclass(frozen=True)
class Job:
    """A run as the loop and every method of training see it; the packer is at its place.

    Attributes:
        streams: that the corpus is read in, by all processes together.
        sources: fingerprints of what a checkpoint relies on without holding it.
        counted: tokens of the corpus, where its epochs are the steps.
    """

    run: Run | Distil
    processes: Processes
    folder: RunFolder
    corpus: Corpus
    tokenizer: Any
    encode: Callable[[str], list[int]]
    packer: packing.Packer
    streams: int
    sources: dict[str, str]
    resumed: Checkpoint | None
    counted: int | None = None
    stop: StopSignal = field(default_factory=StopSignal)

    @property
    def blocks_per_step(self) -> int:
        return _blocks(self.run, self.processes)

    @property
    def tokens_per_step(self) -> int:
        return self.blocks_per_step * self.run.train.block_size

    def batches(self) -> list[dict[str, torch.Tensor]]:
        """This process's micro-batches of the next step."""
        train = self.run.train
        return packing.step_batches(self.packer, train.batch_size, train.grad_accumulation)

    def asked_to_stop(self) -> bool:
        """Was any process sent a signal? All of them get the same answer."""
        return bool(self.processes.total(float(self.stop.asked))[0])

    def manifest(self) -> dict[str, Any]:
        """The part of a checkpoint's manifest that says which run wrote it."""
        return {
            "streams": self.streams,
            "blocks_per_step": self.blocks_per_step,
            "corpus_sha256": self.corpus.fingerprint,
            "layout": str(self.processes.layout),
            "sources": self.sources,
        }

    def is_finished(self) -> bool:
        finished = self.folder.finished_steps() == self.run.steps
        if finished:
            self.processes.say(
                f"{self.folder.final} is already there, after {self.run.steps} steps"
            )
        return finished


def open_job(run: Run | Distil, processes: Processes, source: str, *, fresh: bool = False) -> Job:
    """The run that keys describe; nothing is written and no weights are loaded.

    Args:
        source: the folder of the model.
        fresh: do not go on from a checkpoint.

    Raises:
        BadInput: text, folder or checkpoint do not fit the keys.
    """
    with processes.accelerator.local_main_process_first():  # the others find what it has cached
        corpus = open_corpus(run.data)
    positions, block_size = max_positions(source), run.train.block_size
    if positions is not None and block_size > positions:
        raise BadInput(
            f"train.block_size: expected at most the model's {positions} positions "
            f"(max_position_embeddings), got {block_size}"
        )
    tokenizer = load_tokenizer(source)
    encode = encoder(tokenizer, run.data.append_eos)
    check_length(corpus, encode, block_size)
    counted = None
    if getattr(run.train, "epochs", None) is not None:
        counted = processes.on_main(lambda: _count(corpus, encode))
        run = _with_epochs(run, processes, counted)
    folder = RunFolder.of(run)
    # Whether it is whole is read off its files, which one process may do for all.
    found = processes.on_main(lambda: run_folder.find(folder, run))
    resumed = None if fresh else found
    streams = _streams(run, processes, resumed)
    ranks, rank = processes.layout.data_ranks, processes.layout.data_rank
    mine = packing.streams_of(rank, ranks, streams)
    packer = packing.Packer(
        corpus, encode, block_size, run.seed, streams=streams, mine=mine,
        share=run.lookups.share if isinstance(run, Distil) else 0.0,
        others=lambda reader, seed: LookupBlocks(
            reader, tokenizer, block_size, weight=run.lookups.weight, seed=seed
        ),
    )  # fmt: skip
    job = Job(
        run, processes, folder, corpus, tokenizer, encode, packer, streams,
        _relied_on(run, source, tokenizer, resumed), resumed, counted,
    )  # fmt: skip
    if resumed:
        run_folder.check(resumed, run, job.manifest())
        packer.load_state(resumed.manifest["packer"])
    return job


def check_room(job: Job, needed: int) -> None:
    """Refuse a disk that cannot hold what the run will write, before the work."""
    root, checkpoints = job.folder.root, job.folder.checkpoints
    # Later checkpoints take the place of these.
    needed -= sum(p.stat().st_size for p in checkpoints.rglob("*") if p.is_file())
    parent = next(p for p in (root, *root.resolve().parents) if p.exists())
    if (free := shutil.disk_usage(parent).free) < needed:
        raise BadInput(
            f"output_dir {root} needs {needed / 1e9:.2f} GB, there are {free / 1e9:.2f} GB"
        )


def _blocks(run: Run | Distil, processes: Processes) -> int:
    return processes.layout.data_ranks * run.train.batch_size * run.train.grad_accumulation


def _count(corpus: Corpus, encode: Callable[[str], list[int]]) -> int:
    (documents,) = corpus.sources
    bar = tqdm(documents, desc="counting tokens", unit="document")
    return sum(len(encode(document)) for document in bar if document.strip())


def _with_epochs(run: Run, processes: Processes, tokens: int) -> Run:
    a_step = _blocks(run, processes) * run.train.block_size
    run = run.with_steps(max(1, math.ceil(run.train.epochs * tokens / a_step)))
    if run.warmup_steps > run.steps:
        raise BadInput(
            f"optim.warmup_steps: expected at most the {run.steps} steps of "
            f"train.epochs={run.train.epochs}, got {run.warmup_steps}"
        )
    return run


def _streams(run: Run | Distil, processes: Processes, resumed: Checkpoint | None) -> int:
    """Parts of the corpus that are packed alone, each by one process."""
    ranks, blocks = processes.layout.data_ranks, _blocks(run, processes)
    streams = run.data.streams
    if streams is None:
        # As many as the run began with: the number of processes may change, the text may not.
        streams = resumed.manifest["streams"] if resumed else ranks
    if streams % ranks or blocks % streams:
        raise BadInput(
            f"data.streams: expected a multiple of the {ranks} processes that read rows "
            f"which divides the {blocks} blocks of a step (processes × train.batch_size × "
            f"train.grad_accumulation), got {streams}"
        )
    return streams


def _relied_on(
    run: Run | Distil, source: str, tokenizer: Any, resumed: Checkpoint | None
) -> dict[str, str]:
    found = {"tokenizer": fingerprints.of_tokenizer(tokenizer)}
    parts = isinstance(run, Run) and run.checkpoint.state == "sharded"
    if parts or (resumed and resumed.is_sharded) or getattr(run, "parameters", "") == "lora":
        found["weights"] = fingerprint(source, quick=True)
    return found
