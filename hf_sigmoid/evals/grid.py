"""The samples of an evaluation, in their order, and those that a model reads together."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals.prompts import PromptBuilder
from hf_sigmoid.evals.samples import Sample
from hf_sigmoid.evals.specs import Spec

BATCH_TOKENS = 2**15  # of the prompts of a batch, at most


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
        """All, in the order of tasks, lengths and depths."""
        units = []
        for spec in self.specs:
            for length in self.lengths:
                if each := self.each(spec):
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

    def each(self, spec: Spec) -> int:
        """Questions at each depth that share a haystack; 0: none do."""
        if not self.shared or spec.kind != "multikey":
            return 0
        each = (int(spec.settings[0]) + 1) // len(self.depths)
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
                unit.spec, depths=self.depths, each=self.each(unit.spec), index=unit.haystack,
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
