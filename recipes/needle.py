"""Needle in a haystack: does a model find one sentence in L tokens of text?

    python recipes/needle.py --models A B@sdpa --lengths 256 512 1024 --depths 0 0.5 1 \
        --samples 10 --seed 0 --out runs/needle

A six-digit code is hidden in a window of a novel and asked for at the end. The answer is
teacher-forced in one forward: a sample is correct when every token of the answer is the most
likely one, which is what greedy decoding would print, and its mean log-probability still moves
where accuracy stands at 0 or 100 %. Every model sees the same samples.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import errors
import needle_report
import torch
from errors import BadInput
from tqdm import tqdm
from transformers import AutoTokenizer

import hf_sigmoid  # noqa: F401 (registers the attention functions)
from hf_sigmoid import output_folder, text
from hf_sigmoid.conversions.embedded import checkpoint as resolve
from hf_sigmoid.conversions.haystack import ANSWER, HEAD, NEEDLE, TAIL, Haystack, Sample
from hf_sigmoid.conversions.needles import score_answers
from hf_sigmoid.loading import check_weights, load, load_model, max_positions, twin

TASK = "single_needle"

# What a line of samples.jsonl must hold to be one of ours.
FIELDS = {
    **dict.fromkeys(("model", "attn", "name", "config"), str),
    "weights": str | None,
    "length": int,
    "depth": float,
    "index": int,
    "correct": bool,
    "logprob": float,
}
START = b'{"model": "'  # of every line


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Evaluate as the command line says, write DIR, and return what `summary.json` holds."""
    args = _arguments(argv)
    haystack = _haystack_text(args.haystack)
    names = dict.fromkeys(args.models)  # asked twice is asked once
    plans = [_Plan(name, haystack, args) for name in names]
    samples = _SamplesFile(Path(args.out) / "samples.jsonl", _digest(args, haystack), plans)
    with tqdm(total=sum(len(plan.cells) for plan in plans), unit="sample") as bar:
        for plan in plans:
            _evaluate(plan, samples, args, bar)
    summary = needle_report.summarise(
        samples.of(plans), {"task": TASK, "seed": args.seed, "config": samples.digest}
    )
    needle_report.write(Path(args.out), summary)
    print(needle_report.table(summary))
    print(f"heatmap: {Path(args.out) / needle_report.HEATMAP}")
    return summary


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", required=True, metavar="PATH[@ATTN]", help="ATTN forces a function")
    add("--lengths", nargs="+", type=int, required=True, help="of the prompt, in tokens")
    add("--depths", nargs="+", type=float, default=[0.0, 0.5, 1.0], help="0 start, 1 end")
    add("--samples", type=int, default=10, help="a cell (default: 10)")
    add("--seed", type=int, default=0)
    add("--out", required=True, metavar="DIR")
    add("--haystack", metavar="FILE", help="instead of the built-in novel")
    add("--allow-extrapolation", action="store_true", help="lengths beyond the model's positions")
    add("--batch-size", type=int, default=4)
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    for name, least in (("samples", 1), ("batch_size", 1)):
        if getattr(args, name) < least:
            raise BadInput(f"--{name}: expected at least {least}, got {getattr(args, name)}")
    for depth in args.depths:
        if not 0 <= depth <= 1:
            raise BadInput(f"--depths: expected 0 to 1, got {depth}")
    output_folder.check(Path(args.out), "--out")
    _check_device(args.device)
    args.lengths, args.depths = sorted(set(args.lengths)), sorted(set(args.depths))
    return args


def _check_device(device: str) -> None:
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise BadInput(
            f"--device: expected one that torch can compute on here, got {device!r}: {error}"
        ) from error


def _haystack_text(file: str | None) -> str:
    if file is None:
        return text.austen()
    try:
        content = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--haystack {file}: expected a UTF-8 text file: {error}") from None
    if not content.strip():
        raise BadInput(f"--haystack {file} is empty")
    return content


def _digest(args: argparse.Namespace, haystack: str) -> str:
    """Of everything that makes a sample what it is, but the model and its place in the grid."""
    parts = (TASK, HEAD, NEEDLE, TAIL, ANSWER, haystack, args.seed, args.dtype)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class _Plan:
    """One model's part of the run; refuses what it cannot do before any of it is done."""

    def __init__(self, name: str, haystack: str, args: argparse.Namespace):
        path, at, attn = name.rpartition("@")
        # A folder's own name may hold an @.
        self.path, self.attn = (path, attn) if at and not Path(name).exists() else (name, None)
        self.name = name
        self.source = resolve(self.path)
        twin(self.source, self.attn)
        check_weights(self.source)
        self.weights = _weights_digest(self.source)
        tokenizer = load(AutoTokenizer, self.source)
        try:
            self.haystack = Haystack(haystack, tokenizer)
        except ValueError as error:
            raise BadInput(f"--haystack: {error}") from None
        self.cells = [
            (length, depth, index)
            for length in args.lengths
            for depth in args.depths
            for index in range(args.samples)
        ]
        positions = max_positions(self.source)
        for cell in self.cells:
            sample = self.sample(cell, args.seed)
            needed = len(sample.prompt) + len(sample.answer)
            if positions and needed > positions and not args.allow_extrapolation:
                raise BadInput(
                    f"--lengths: {name} was made for {positions} positions, and a prompt of "
                    f"{cell[0]} tokens and its answer take {needed}: expected a length up to "
                    f"{positions - len(sample.answer)}, or --allow-extrapolation"
                )

    def sample(self, cell: tuple[int, float, int], seed: int) -> Sample:
        length, depth, index = cell
        try:
            return self.haystack.sample(length=length, depth=depth, seed=seed, index=index)
        except ValueError as error:
            raise BadInput(f"--lengths: {error}") from None


class _SamplesFile:
    """The samples done so far, on disk one by one, so that a stopped run goes on where it was."""

    def __init__(self, file: Path, digest: str, plans: list[_Plan]):
        self.file, self.digest = file, digest
        self.done: dict[tuple, dict[str, Any]] = {}
        self._stream: BinaryIO | None = None
        weights = {plan.name: plan.weights for plan in plans}
        for sample in self._read():
            if sample["config"] != digest:
                raise BadInput(
                    f"--out {file.parent} holds samples of another task, seed, haystack or dtype: "
                    "choose another folder"
                )
            if sample["weights"] != weights.get(sample["name"], sample["weights"]):
                raise BadInput(
                    f"--out {file.parent} holds samples of {sample['name']} as it was before its "
                    "files changed: choose another folder"
                )
            self.done[_key(sample)] = sample

    def _read(self) -> Iterator[dict[str, Any]]:
        """The samples of the file; refuses one in which anything else stands."""
        if self.file.exists() and not self.file.is_file():
            raise BadInput(f"--out: expected a file or nothing at {self.file}, got a folder")
        content = self.file.read_bytes() if self.file.exists() else b""
        # A line is whole once its newline is there. A killed run leaves at most one that is not.
        *lines, rest = content.split(b"\n")
        self._complete = len(content) - len(rest)
        for number, line in enumerate([*lines, rest], 1):
            whole = number <= len(lines)
            if not whole and line[: len(START)] == START[: len(line)]:
                return
            sample = _parsed(line)
            if sample is None or not whole:
                raise BadInput(
                    f"--out: line {number} of {self.file} is not a sample of this evaluation, "
                    f"expected a JSON object with {', '.join(FIELDS)}, got {line[:60]!r}: mend the "
                    "file or choose another folder"
                )
            yield sample

    def _open(self) -> BinaryIO:
        """The file, made for its first new sample, without what a killed run did not finish."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        stream = self.file.open("ab")
        stream.truncate(self._complete)
        return stream

    def add(self, sample: dict[str, Any]) -> None:
        if _key(sample) not in self.done:
            self._stream = self._stream or self._open()
            self.done[_key(sample)] = sample
            self._stream.write(json.dumps(sample).encode() + b"\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def has(self, name: str, cell: tuple[int, float, int]) -> bool:
        return (name, *cell) in self.done

    def of(self, plans: list[_Plan]) -> list[dict[str, Any]]:
        return [self.done[(plan.name, *cell)] for plan in plans for cell in plan.cells]


def _key(sample: dict[str, Any]) -> tuple:
    return tuple(sample[name] for name in ("name", "length", "depth", "index"))


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The sample of a line, None if it holds anything else."""
    try:
        sample = json.loads(line)
    except ValueError:
        return None
    is_ours = isinstance(sample, dict) and all(
        name in sample and isinstance(sample[name], kind) for name, kind in FIELDS.items()
    )
    return sample if is_ours else None


def _weights_digest(source: str) -> str | None:
    """Of a folder's configuration and weights; a hub id is taken at its word."""
    folder = Path(source)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:16]


def _evaluate(plan: _Plan, samples: _SamplesFile, args: argparse.Namespace, bar: tqdm) -> None:
    missing = [cell for cell in plan.cells if not samples.has(plan.name, cell)]
    bar.update(len(plan.cells) - len(missing))
    if not missing:
        return
    bar.set_description(plan.name[-30:])
    model = load_model(plan.source, dtype=getattr(torch, args.dtype), attn=plan.attn)
    model = model.to(args.device).eval()
    for cells in _batches(plan.cells, args.batch_size):
        # A batch is repeated whole: its size can move the last bits.
        if not set(cells) & set(missing):
            continue
        batch = [plan.sample(cell, args.seed) for cell in cells]
        for cell, sample, score in zip(cells, batch, score_answers(model, batch), strict=True):
            length, depth, index = cell
            samples.add(
                {
                    "model": plan.path,
                    "attn": model.config._attn_implementation,
                    "task": TASK,
                    "length": length,
                    "depth": depth,
                    "index": index,
                    "realised_depth": sample.realised_depth,
                    "prompt_tokens": len(sample.prompt),
                    "answer_tokens": len(sample.answer),
                    "needle": list(sample.needle),
                    "city": sample.city,
                    "value": sample.value,
                    **score,
                    "name": plan.name,
                    "weights": plan.weights,
                    "config": samples.digest,
                }
            )
        bar.update(len(set(cells) & set(missing)))


def _batches(cells: list[tuple], size: int) -> Iterator[list[tuple]]:
    """Runs of one cell of the grid, so that no batch needs padding."""
    for start in range(0, len(cells)):
        length, depth, index = cells[start]
        if index % size == 0:
            yield [c for c in cells[start : start + size] if c[:2] == (length, depth)]


if __name__ == "__main__":
    errors.run(main)
