"""The prompts of each model, by its own tokenizer, checked before any model is run."""

from collections.abc import Sequence
from typing import Any

from hf_sigmoid import fingerprints
from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals import loss
from hf_sigmoid.evals.checks import TAIL
from hf_sigmoid.evals.grid import Unit
from hf_sigmoid.evals.prompts import PromptBuilder
from hf_sigmoid.evals.samples import Sample
from hf_sigmoid.evals.scoring import BEYOND
from hf_sigmoid.evals.settings import Settings
from hf_sigmoid.evals.store import Store
from hf_sigmoid.evals.subjects import Subject
from hf_sigmoid.text import austen, sources

DATASET_TOKENS = 2**20  # that are read of a data set, at least


def haystack(settings: Settings, tokenizer: Any) -> Any:
    """The text, with its `name`, `content` and `sha256`.

    Raises:
        BadInput: no such text, or an empty one.
    """
    length = settings.loss_length or max(settings.grid.lengths)
    needed = max(4 * max(settings.grid.lengths), 2 * settings.loss * length)
    # In large steps, since more of a data set is another text.
    tokens = max(DATASET_TOKENS, 1 << (needed - 1).bit_length())
    try:
        return sources.read(settings.haystack, austen, "haystack", tokenizer, tokens)
    except ValueError as error:
        raise BadInput(f"--haystack: {error}") from None


def builder_of(settings: Settings, tokenizer: Any, text: str) -> PromptBuilder:
    """A builder of the samples.

    Raises:
        BadInput: a text without sentences, a template that cannot be used.
    """
    try:
        return PromptBuilder(
            tokenizer, text, prompt=settings.prompt, decoys=settings.decoys,
            template_options=dict(settings.template), repeat=settings.repeat_haystack,
        )  # fmt: skip
    except ValueError as error:
        where = "--prompt" if "template" in str(error) else "--haystack"
        raise BadInput(f"{where}: {error}") from None


def plans(settings: Settings, subjects: Sequence[Subject], text: str) -> list["Plan"]:
    """One for each model; models of one tokenizer share its prompts.

    Raises:
        BadInput: a prompt that cannot be built, or that a model has no positions for.
    """
    builders: dict[str, PromptBuilder] = {}
    found = []
    for subject in subjects:
        # A template makes other prompts of the same tokens.
        tokenizer = subject.tokenizer
        key = f"{fingerprints.of_tokenizer(tokenizer)} {tokenizer.chat_template}"
        if key not in builders:
            builders[key] = builder_of(settings, tokenizer, text)
        found.append(Plan(subject, builders[key], settings))
    return found


class Plan:
    """One model's part of the run.

    `keys` are those of each unit's samples, with their digests; `windows` those of the loss, by
    theirs;
    `longest` is the last position that any of them needs.
    """

    def __init__(self, subject: Subject, builder: PromptBuilder, settings: Settings):
        self.subject, self.builder, self.grid = subject, builder, settings.grid
        self.longest = 0
        self.keys: dict[Unit, list[tuple[str, str]]] = {}
        for unit in self.grid.units:
            samples = self.grid.build(builder, unit)
            self.keys[unit] = [(sample.key, sample.digest) for sample in samples]
            for sample in samples:
                self._check_sample(sample, settings)
        windows = self._windows(settings) if settings.loss else []
        self.windows = {loss.digest(window): window for window in windows}

    @property
    def order(self) -> list[tuple[str, str]]:
        """Model's name and key of every sample."""
        return [(self.subject.name, key) for keys in self.keys.values() for key, _ in keys]

    def agree(self, kept: Store) -> None:
        """Refuse samples that were scored of other prompts.

        Raises:
            BadInput: there is one.
        """
        for unit, keys in self.keys.items():
            for key, digest in keys:
                done = kept.done.get((self.subject.name, key))
                if done and done["prompt_sha256"] != digest:
                    raise BadInput(
                        f"--out {kept.folder} holds a sample of {unit.spec} that another release, "
                        "tokenizer or text built otherwise: choose another folder"
                    )

    def missing(self, kept: Store) -> list[Unit]:
        """Units of which a sample is not scored yet."""
        name = self.subject.name
        return [
            unit
            for unit, keys in self.keys.items()
            if any((name, key) not in kept.done for key, _ in keys)
        ]

    def _check_sample(self, sample: Sample, settings: Settings) -> None:
        needed, length = sample.positions, sample.length
        if "generate" in settings.scores:
            needed = max(needed, length + len(sample.answer) + BEYOND)
        self.longest = max(self.longest, needed)
        subject = self.subject
        if not self._fits(needed, settings):
            raise BadInput(
                f"--lengths: {subject.name} was made for {subject.positions} positions, and a "
                f"prompt of {length} tokens and its answer take {needed}: expected a length up to "
                f"{subject.positions - (needed - length)}{self._more}"
            )
        switch, read = subject.rope_switch, (sample.shared or length - 1) - TAIL
        if switch and needed > switch and (subject.rope_is_dynamic or read <= switch):
            raise BadInput(
                f"--lengths: the RoPE of {subject.name} changes at {switch} positions, and keys "
                f"from before would meet queries from behind in a prompt of {length} tokens and "
                f"its answer: expected at most {switch - (needed - length)} tokens"
                + ("" if subject.rope_is_dynamic else f", or {switch + 1 + length - read}")
            )

    def _windows(self, settings: Settings) -> list[list[int]]:
        subject, length = self.subject, settings.loss_length or max(settings.grid.lengths)
        self.longest = max(self.longest, length)
        if not self._fits(length, settings):
            raise BadInput(
                f"--loss-length: {subject.name} was made for {subject.positions} positions, got "
                f"{length}: expected at most as many{self._more}"
            )
        if subject.rope_switch and length > subject.rope_switch:
            raise BadInput(
                f"--loss-length: the RoPE of {subject.name} changes at {subject.rope_switch} "
                f"positions, expected at most as many, got {length}"
            )
        encoder, ids = self.builder.encoder, self.builder.haystack.ids
        start = encoder.special_prefix()
        return loss.windows(ids, length, settings.loss, settings.grid.seed, start)

    def _fits(self, needed: int, settings: Settings) -> bool:
        positions = self.subject.positions
        if positions is None or needed <= positions:
            return True
        return settings.allow_extrapolation and not self.subject.learned_positions

    @property
    def _more(self) -> str:
        """What else would help."""
        if self.subject.learned_positions:
            return ": it has learned no others"
        return ", or --allow-extrapolation, maybe with --rope"
