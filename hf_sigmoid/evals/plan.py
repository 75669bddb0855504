"""Each model's part of an evaluation, by its own tokenizer, checked before any model is run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_sigmoid import fingerprints
from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals import loss
from hf_sigmoid.evals.checks import TAIL
from hf_sigmoid.evals.models import EvaluatedModel
from hf_sigmoid.evals.prompts import PromptBuilder
from hf_sigmoid.evals.samples import Sample
from hf_sigmoid.evals.scoring import BEYOND
from hf_sigmoid.evals.settings import Grid, Settings, Unit
from hf_sigmoid.evals.store import Key, Store
from hf_sigmoid.text import austen, sources

DATASET_TOKENS = 2**20  # that are read of a data set, at least


@dataclass(frozen=True)
class How:
    """How every model is asked.

    Args:
        attention: samples of each cell whose attention on the needle is recorded.
        windows: of the loss: how many, and tokens of each.
        extrapolates: whether positions beyond a model's own may be asked.
        strict: a failed check is an error.
    """

    scores: tuple[str, ...]
    attention: int
    windows: tuple[int, int]
    extrapolates: bool
    device: str
    strict: bool


@dataclass(frozen=True)
class ModelPlan:
    """Everything that one model is asked.

    Args:
        keys: of each unit's samples, with their digests.
        windows: of the loss, by their digests.
        longest: the last position that any of them needs.
    """

    model: EvaluatedModel
    builder: PromptBuilder
    grid: Grid
    how: How
    keys: dict[Unit, list[tuple[str, str]]]
    windows: dict[str, list[int]]
    longest: int

    @property
    def order(self) -> list[Key]:
        """Model's name and key of every sample."""
        return [(self.model.name, key) for keys in self.keys.values() for key, _ in keys]

    def missing(self, store: Store) -> list[Unit]:
        """Units of which a sample is not scored yet.

        Raises:
            BadInput: a sample that was scored of another prompt.
        """
        found = []
        for unit, keys in self.keys.items():
            held = [store.done.get((self.model.name, key)) for key, _ in keys]
            for done, (_, digest) in zip(held, keys, strict=True):
                if done and done["prompt_sha256"] != digest:
                    raise BadInput(
                        f"--out {store.folder} holds a sample of {unit.spec} that another release, "
                        "tokenizer or text built otherwise: choose another folder"
                    )
            if None in held:
                found.append(unit)
        return found


def read_haystack(settings: Settings, tokenizer: Any) -> sources.Text:
    """The text, with its `name`, `content` and `sha256`.

    Raises:
        BadInput: no such text, or an empty one.
    """
    needed = max(4 * max(settings.grid.lengths), 2 * math.prod(settings.windows))
    # In large steps, since more of a data set is another text.
    tokens = max(DATASET_TOKENS, 1 << (needed - 1).bit_length())
    try:
        return sources.read(settings.haystack, austen, "haystack", tokenizer, tokens)
    except ValueError as error:
        raise BadInput(f"--haystack: {error}") from None


def builders_of(
    models: Sequence[EvaluatedModel], text: str, **prompting: Any
) -> list[PromptBuilder]:
    """One for each model; models of one tokenizer share its prompts."""
    made: dict[str, PromptBuilder] = {}
    found = []
    for model in models:
        # A template makes other prompts of the same tokens.
        key = f"{fingerprints.of_tokenizer(model.tokenizer)} {model.tokenizer.chat_template}"
        if key not in made:
            made[key] = builder_of(model.tokenizer, text, **prompting)
        found.append(made[key])
    return found


def builder_of(tokenizer: Any, text: str, **prompting: Any) -> PromptBuilder:
    """A builder of the samples.

    Raises:
        BadInput: a text without sentences, a template that cannot be used.
    """
    try:
        return PromptBuilder(tokenizer, text, **prompting)
    except ValueError as error:
        where = "--prompt" if "template" in str(error) else "--haystack"
        raise BadInput(f"{where}: {error}") from None


def plan_for(model: EvaluatedModel, builder: PromptBuilder, grid: Grid, how: How) -> ModelPlan:
    """A plan that the model can be asked.

    Raises:
        BadInput: a prompt that cannot be built, or that the model has no positions for.
    """
    keys, longest = {}, 0
    for unit in grid.units:
        samples = grid.build(builder, unit)
        keys[unit] = [(sample.key, sample.digest) for sample in samples]
        for sample in samples:
            needed = sample.positions
            if "generate" in how.scores:
                needed = max(needed, sample.length + len(sample.answer) + BEYOND)
            _check_sample(model, sample, needed, how.extrapolates)
            longest = max(longest, needed)
    chosen: list[list[int]] = []
    count, length = how.windows
    if count:
        _check_positions(
            model, length, how.extrapolates, "--loss-length",
            f", got {length}: expected at most as many",
        )  # fmt: skip
        if model.rope_switch and length > model.rope_switch:
            raise BadInput(
                f"--loss-length: the RoPE of {model.name} changes at {model.rope_switch} "
                f"positions, expected at most as many, got {length}"
            )
        longest = max(longest, length)
        start = builder.encoder.special_prefix()
        chosen = loss.windows(builder.haystack.ids, length, count, grid.seed, start)
    by_digest = {loss.digest(window): window for window in chosen}
    return ModelPlan(model, builder, grid, how, keys, by_digest, longest)


def _check_sample(model: EvaluatedModel, sample: Sample, needed: int, extrapolates: bool) -> None:
    length, more = sample.length, needed - sample.length
    _check_positions(
        model, needed, extrapolates, "--lengths",
        f", and a prompt of {length} tokens and its answer take {needed}: expected a length up to "
        f"{(model.positions or 0) - more}",
    )  # fmt: skip
    switch, read = model.rope_switch, (sample.shared or length - 1) - TAIL
    if switch and needed > switch and (model.rope_is_dynamic or read <= switch):
        raise BadInput(
            f"--lengths: the RoPE of {model.name} changes at {switch} positions, and keys "
            f"from before would meet queries from behind in a prompt of {length} tokens and "
            f"its answer: expected at most {switch - more} tokens"
            + ("" if model.rope_is_dynamic else f", or {switch + 1 + length - read}")
        )


def _check_positions(
    model: EvaluatedModel, needed: int, extrapolates: bool, option: str, words: str
) -> None:
    if model.positions is None or needed <= model.positions:
        return
    if model.learned_positions:
        words += ": it has learned no others"
    elif extrapolates:
        return
    else:
        words += ", or --allow-extrapolation, maybe with --rope"
    raise BadInput(f"{option}: {model.name} was made for {model.positions} positions{words}")
