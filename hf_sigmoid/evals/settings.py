"""The settings of an evaluation, its grid of samples, the presets."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals.prompts import PromptBuilder
from hf_sigmoid.evals.samples import Sample
from hf_sigmoid.evals.templates import Spec

SCORES = ("teacher", "generate")  # see `scoring.py`
FORMAT = 1  # of samples.jsonl; another one never goes on with a folder of this one
BATCH_TOKENS = 2**15  # of the prompts of a batch, at most

FIVE = [0.0, 0.25, 0.5, 0.75, 1.0]
PRESETS: dict[str, dict[str, Any]] = {
    # Two cores, a model of 135M parameters under two functions: minutes. 25 questions of a task
    # and length: with fewer no length could keep 85 %.
    "cpu": {
        "tasks": ["single", "multikey:16", "cwe:1x8x2"], "lengths": [512, 1024, 2048],
        "depths": FIVE, "samples": 5, "decoys": 4, "attention": 1, "loss": 4,
    },
    "quick": {
        "tasks": ["single", "multikey:16", "vt:1x2", "cwe:3x8x2"], "lengths": [1024, 4096],
        "depths": FIVE, "samples": 5, "attention": 1, "loss": 8,
    },
    "full": {
        "tasks": [
            "passkey", "single", "single:uuid", "multikey:2", "multikey:4", "multikey:8",
            "multikey:16", "multikey:32", "multivalue:4", "multiquery:4", "vt:1x4", "cwe", "fwe",
            "nolap:3", "babi:2",
        ],
        "lengths": [4096, 8192, 16384, 32768, 65536, 131072],
        "depths": [i / 10 for i in range(11)], "attention": 1, "loss": 8,
        "loss_length": 8192,  # of the built-in novel; a text of your own can have longer windows
        "repeat_haystack": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Unit:
    """Samples that are scored in one go, whole or not at all: a batch, or one haystack's questions.

    A batch's size can move the last bits of a score, so a unit is the same however a run is
    stopped, resumed, or shared out.
    """

    spec: Spec
    length: int
    depth: float | None
    indices: tuple[int, ...]
    haystack: int | None = None  # its number, of shared ones


@dataclass(frozen=True)
class Grid:
    """The cells of an evaluation: tasks × lengths × depths, `samples` in each.

    Args:
        shared: whether the keys of `multikey` tasks are asked for in one haystack, as many as
            fit: N + 1 keys for D depths make ⌊(N + 1) / D⌋ questions at each depth.
        batch: rows at most; long prompts go by fewer.
    """

    specs: tuple[Spec, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int
    seed: int = 0
    batch: int = 4
    shared: bool = True

    @cached_property
    def units(self) -> list[Unit]:
        """Units of all cells, in the order of tasks, lengths and depths."""
        units = []
        for spec in self.specs:
            for length in self.lengths:
                if each := self._each(spec):
                    count = -(-self.samples // each)
                    units += [Unit(spec, length, None, (), number) for number in range(count)]
                    continue
                rows = max(1, min(self.batch, BATCH_TOKENS // length))
                for depth in self.depths if spec.has_depth else (None,):
                    units += [
                        Unit(spec, length, depth, tuple(range(self.samples)[at : at + rows]))
                        for at in range(0, self.samples, rows)
                    ]
        return units

    def _each(self, spec: Spec) -> int:
        """Questions at each depth that share a haystack; 0: none do."""
        if not self.shared or spec.kind != "multikey":
            return 0
        each = (spec.settings[0] + 1) // len(self.depths)
        # One question at one depth shares nothing.
        return each if each * len(self.depths) > 1 else 0

    def build(self, builder: PromptBuilder, unit: Unit) -> list[Sample]:
        """The samples of a unit.

        Raises:
            BadInput: a length that does not fit, an answer that the tokenizer cannot write.
        """
        about = {"length": unit.length, "seed": self.seed}
        try:
            if unit.haystack is None:
                return [
                    builder.build(unit.spec, depth=unit.depth, index=index, **about)
                    for index in unit.indices
                ]
            made = builder.build_shared(
                unit.spec, depths=self.depths, each=self._each(unit.spec), index=unit.haystack,
                **about,
            )  # fmt: skip
        except ValueError as error:
            raise BadInput(f"{unit.spec} at {unit.length} tokens: {error}") from None
        # The last haystack may have more questions than are asked for.
        return [sample for sample in made if sample.index < self.samples]

    def samples_of(self, builder: PromptBuilder) -> Iterator[Sample]:
        """Every sample, built unit by unit."""
        for unit in self.units:
            yield from self.build(builder, unit)


@dataclass(frozen=True)
class Settings:
    """One evaluation, as the command line says it; of one that only builds, what is not asked."""

    grid: Grid
    out: Path
    haystack: tuple[str, ...] | None
    repeat_haystack: bool
    prompt: str
    template: tuple[tuple[str, Any], ...]
    decoys: int
    models: tuple[str, ...] = ()
    attn: tuple[str | None, ...] = ()
    score: tuple[str, ...] = ()
    attention: int = 0  # samples of each cell whose attention on the needle is recorded
    loss: int = 0  # windows of the loss by position
    loss_length: int | None = None
    rope: str | None = None
    allow_extrapolation: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    checks: str = "stop"

    @property
    def windows(self) -> tuple[int, int]:
        """How many windows of the loss there are, and how many tokens each has."""
        return self.loss, self.loss_length or max(self.grid.lengths)

    @property
    def prompting(self) -> dict[str, Any]:
        """The options of a `PromptBuilder`."""
        return {
            "prompt": self.prompt, "decoys": self.decoys,
            "template_options": dict(self.template), "repeat": self.repeat_haystack,
        }  # fmt: skip

    def digest(self, haystack_sha256: str) -> str:
        """The hash of everything that makes a score what it is, but the model and the grid."""
        import torch

        parts = (
            FORMAT, haystack_sha256, self.grid.seed, self.dtype, self.prompt, self.decoys,
            sorted(self.score), self.attention, self.grid.batch, self.template,
            torch.device(self.device).type, self.repeat_haystack,
        )  # fmt: skip
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
