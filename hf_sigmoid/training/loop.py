"""The loop around the steps of a run, whatever it trains: log, evaluation, saving, stopping."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from hf_sigmoid.files import write_text
from hf_sigmoid.run_lock import RunLock
from hf_sigmoid.training import checkpointing, run_config
from hf_sigmoid.training.checkpointing import Checkpoint
from hf_sigmoid.training.job import Job
from hf_sigmoid.training.packing import merged
from hf_sigmoid.training.run_log import RunLog, finite
from hf_sigmoid.training.trackers import Trackers

GO_ON = "the same command goes on from there"


class Method(Protocol):
    """A way to train. Every process calls every method."""

    def resume(self, checkpoint: Checkpoint) -> None:
        """Take weights and optimiser out of a checkpoint."""

    def step(self, number: int) -> dict[str, Any]:
        """One update; the values to log."""

    def is_due(self, number: int) -> bool:
        """Is there something to evaluate after a step (0: before the first)?"""

    def evaluate(self, number: int) -> dict[str, Any] | None:
        """The values that are due then; None: asked to stop meanwhile."""

    def line(self, values: dict[str, Any]) -> str:
        """The values of a step for the progress line."""

    def not_finite(self) -> str | None:
        """The name of a weight that a step has ruined, in what this process holds."""

    def manifest(self) -> dict[str, Any]:
        """The method's part of a checkpoint's manifest."""

    def write_checkpoint(self, folder: Path) -> None: ...

    def write_final(self, folder: Path) -> None: ...


def run_to_end(job: Job, method: Method) -> Path | None:
    """Train from the last checkpoint to the final model; None if a signal ended it early.

    Raises:
        FloatingPointError: the run diverged.
        KeyboardInterrupt: Ctrl-C, after what was done is saved; a second one, at once.
    """
    run, processes, folder = job.run, job.processes, job.folder
    done = logged = 0
    if job.resumed:
        method.resume(job.resumed)
        done, logged = job.resumed.step, job.resumed.logged
        processes.say(f"resuming after step {done} of {run.steps}")
    with ExitStack() as stack:
        stack.enter_context(_locked(job))
        log = None
        if processes.main:
            write_text(folder.config, run_config.dump(run))
            checkpointing.clean_up(folder.checkpoints, job.resumed)
            log = stack.enter_context(closing(RunLog(folder.log, after=logged)))
        trackers = Trackers(processes.accelerator, run, folder.root, done)
        stack.enter_context(closing(trackers))
        stack.enter_context(job.stop)
        if not _steps(job, method, log, trackers, done):
            return None
        _refuse_ruined(job, method, run.steps)
        # Whoever asks to stop now would lose the last steps: it is written to its end.
        checkpointing.publish(folder.final, method.write_final, processes)
    processes.say(f"final model in {folder.final}")
    return folder.final


@contextmanager
def _locked(job: Job) -> Iterator[None]:
    """Make the folder and keep other runs out of it."""
    locks: list[RunLock] = []

    def lock() -> None:
        job.folder.root.mkdir(parents=True, exist_ok=True)
        locks.append(RunLock(job.folder.root))

    job.processes.on_main(lock)
    try:
        yield
    finally:
        for each in locks:
            each.release()


def _steps(job: Job, method: Method, log: RunLog | None, trackers: Trackers, done: int) -> bool:
    """Train from step `done` on; False if a signal ended it early, after saving."""
    last, checkpoint = job.run.steps, job.run.checkpoint
    pending, before = job.resumed and job.resumed.pending, {}
    with tqdm(total=last, initial=done, unit="step", disable=not job.processes.main) as bar:
        if not done and method.is_due(0):
            before = method.evaluate(0)
            if before is None:
                return _stopped(job, "before the first step: the same command begins anew")
        for number in range(done + (not pending), last + 1):
            stopping = False
            if pending:
                values, pending = pending, None
            else:
                values = method.step(number) | ({"before": before} if before else {})
                stopping, before = job.asked_to_stop() and number < last, None
            if method.is_due(number):
                found = None if stopping else method.evaluate(number)
                if found is None:
                    # What was not measured is measured when the run goes on, and logged then.
                    _save(job, method, log, number, values)
                    where = f"in the evaluation of step {number}, which is saved: {GO_ON}"
                    return _stopped(job, where)
                values |= found
                stopping = job.asked_to_stop() and number < last
            if log:
                log.write(step=number, **values)
            trackers.log(number, values)
            bar.update(number - bar.n)
            bar.set_postfix_str(method.line(values))
            if stopping or (checkpoint.every and number % checkpoint.every == 0):
                _save(job, method, log, number)
            if stopping:
                return _stopped(job, f"step {number} is saved: {GO_ON}")
    return True


def _save(
    job: Job, method: Method, log: RunLog | None, step: int, pending: dict[str, Any] | None = None
) -> None:
    """A checkpoint."""
    _refuse_ruined(job, method, step)
    packer = merged(job.processes.everywhere(job.packer.state()))
    if log:
        log.sync()
    state = {"packer": packer, **job.manifest(), "pending": finite(pending), **method.manifest()}
    checkpointing.save(
        job.folder.checkpoints, method.write_checkpoint, job.processes,
        step=step, keep=job.run.checkpoint.keep, state=state,
    )  # fmt: skip


def _refuse_ruined(job: Job, method: Method, step: int) -> None:
    """End the run on every process if a step has ruined a weight on one of them."""
    ruined = [name for name in job.processes.everywhere(method.not_finite()) if name]
    if ruined:
        raise FloatingPointError(
            f"step {step}: {ruined[0]} is not finite any more, and nothing was written. "
            + checkpointing.last_one(job.folder.checkpoints, step)
        )


def _stopped(job: Job, how: str) -> bool:
    """False, after a word on how to go on.

    Raises:
        KeyboardInterrupt: with that word, if it was Ctrl-C that stopped the run.
    """
    if job.stop.interrupted:
        raise KeyboardInterrupt(f"interrupted; {how}")
    job.processes.say(f"stopped by a signal; {how}")
    return False
