"""The cost of continue_pretrain.py beside a bare loop of transformers, on the same batches.

    python recipes/overhead.py --model smollm2

The two take turns, step by step, in one process: the same model, batch, optimiser. The bare loop is
forward with labels, backward, clip, step. Also how fast the packer is, on one core, and what QuacK,
QK-clip and a look at attention take of a step.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from hf_sigmoid import files
from hf_sigmoid.errors import BadInput
from hf_sigmoid.files import write_text
from hf_sigmoid.training import run_config, script

with script.loading():
    import torch
    from tqdm import tqdm

    from hf_sigmoid.training import prepare
    from hf_sigmoid.training.packing import Packer
    from hf_sigmoid.training.pretraining import Pretraining

FILE = Path(__file__).parent / "results" / "overhead.json"


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Raises BadInput for options that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--attn", default="ssmax")
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=15, help="of each loop")
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args(argv)
    if args.steps < 2:
        raise BadInput(f"--steps: expected at least 2, the first warms up, got {args.steps}")
    files.check_folder(args.out.parent, "--out")
    if args.out.is_dir():
        raise BadInput(f"--out: expected a file to write, got the folder {args.out}")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.out, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return found


def measure(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Ratios of median times."""
    found = {"model": args.model, "attn": args.attn, "block_size": args.block_size,
             "steps": args.steps, "torch_threads": torch.get_num_threads()}  # fmt: skip
    found |= _beside_a_bare_loop(args, folder / "plain")
    for name, key in (("quack", "optim.qk_tau=1"), ("qk_clip", "optim.qk_clip=100")):
        found |= _control(args, folder / name, name, key)
    return {key: round(v, 4) if isinstance(v, float) else v for key, v in found.items()}


def _beside_a_bare_loop(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Every pair of steps has the same batch."""
    training = _prepared(args, folder)
    packer = training.job.packer
    ours, bare = [], []
    for step in tqdm(range(1, args.steps + 2), desc="beside a bare loop", unit="step"):
        place = packer.state()
        # Whichever goes first finds colder caches: they take turns at that too.
        for mine in (True, False) if step % 2 else (False, True):
            packer.load_state(place)
            if mine:
                ours.append(_timed(lambda step=step: training.step(step)))
            else:
                bare.append(_bare_step(training))
    tok_s, packer_tok_s = args.block_size / median(ours[1:]), _packer_rate(training)
    return {
        "over_bare_loop": _ratio(ours, bare) - 1, "tok_s": tok_s, "packer_tok_s": packer_tok_s,
        "packer_over_training": packer_tok_s / tok_s,
    }  # fmt: skip


def _packer_rate(training: Pretraining, blocks: int = 100) -> float:
    """Tokens a second on one core, reading and tokenising included."""
    job, threads = training.job, torch.get_num_threads()
    torch.set_num_threads(1)
    packer = Packer(job.corpus, job.encode, job.run.train.block_size, 0)
    seconds = _timed(lambda: [packer.next_block(0) for _ in range(blocks)])
    torch.set_num_threads(threads)
    return blocks * job.run.train.block_size / seconds


def _control(args: argparse.Namespace, folder: Path, name: str, key: str) -> dict[str, float]:
    """Timed alone, not as a difference of two steps: it is less than steps differ."""
    training = _prepared(args, folder, key)
    took, whole = [], []
    for step in tqdm(range(1, args.steps // 2 + 2), desc=name, unit="step"):
        whole.append(_timed(lambda step=step: training.step(step)))
        took.append(_timed(lambda: _control_alone(training)))
    shares = {f"{name}_share": _ratio(took, whole)}
    if name == "quack":
        shares["health_share"] = _ratio([_timed(training.control.health) for _ in range(4)], whole)
    return shares


def _prepared(args: argparse.Namespace, folder: Path, *keys: str) -> Pretraining:
    """A run just before its first step."""
    run = run_config.load(None, [
        f"model={args.model}", f"output_dir={folder}", f"attn={args.attn}",
        f"train.block_size={args.block_size}", "evaluate.health_every=1000", *keys,
    ])  # fmt: skip
    return prepare.build(prepare.check(run))


def _bare_step(training: Pretraining) -> float:
    """The step of a script of ten lines on the same batch."""
    model, optimizer = training.model, training.optimizer
    (batch,) = training.job.batches()
    labels = torch.cat([batch["input_ids"][:, :1], batch.pop("labels")[:, :-1]], 1)

    def step() -> None:
        model(**batch, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return _timed(step)


def _control_alone(training: Pretraining) -> None:
    """Norms, the copy before a step and the scaling after it, around an update of nothing."""
    control = training.control
    if control.quack is not None:
        control.quack.keep(training.optimizer)
        control.quack.scale(training.optimizer)
    control.after_step(0.0)


def _timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _ratio(one: list[float], other: list[float]) -> float:
    """A ratio of medians, without the first of each, which allocates."""
    return median(one[1:]) / median(other[1:])


if __name__ == "__main__":
    script.run(main)
