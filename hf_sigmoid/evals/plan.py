"""What each model is asked: prompts of its own tokenizer, checked before any model is run."""

from collections.abc import Sequence
from typing import Any

from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals import loss, store
from hf_sigmoid.evals.haystack_text import read_haystack
from hf_sigmoid.evals.prompts import PromptBuilder
from hf_sigmoid.evals.settings import Settings
from hf_sigmoid.evals.subjects import Subject
from hf_sigmoid.loading import tokenizer_print


def haystack(settings: Settings, tokenizer: Any) -> Any:
    """The text, repeated where that is asked for.

    Raises:
        BadInput: no such text, or an empty one.
    """
    needed = max(settings.grid.lengths) + (settings.loss_length or 0)
    try:
        text = read_haystack(settings.haystack, tokenizer, 4 * needed)
    except ValueError as error:
        raise BadInput(f"--haystack: {error}") from None
    if settings.repeat_haystack:
        size = len(tokenizer(text.content, add_special_tokens=False, verbose=False)["input_ids"])
        times = -(-(max(settings.grid.lengths) * 5 // 4) // size)
        if times > 1:
            text = type(text)(f"{text.name}, {times} times", "\n\n".join([text.content] * times))
    return text


def build(settings: Settings, tokenizer: Any) -> tuple[PromptBuilder, str]:
    """A builder of the samples, and the haystack's name."""
    text = haystack(settings, tokenizer)
    return _builder(settings, tokenizer, text.content), text.name


def _builder(settings: Settings, tokenizer: Any, text: str) -> PromptBuilder:
    try:
        return PromptBuilder(tokenizer, text, prompt=settings.prompt, decoys=settings.decoys)
    except ValueError as error:
        where = "--prompt" if "template" in str(error) else "--haystack"
        raise BadInput(f"{where}: {error}") from None


def plans(settings: Settings, subjects: Sequence[Subject], text: str) -> list["Plan"]:
    builders: dict[str, PromptBuilder] = {}
    plans = []
    for subject in subjects:
        # A template makes other prompts of the same tokens.
        tokenizer = subject.tokenizer
        key = f"{tokenizer_print(tokenizer)} {tokenizer.chat_template}"
        if key not in builders:
            builders[key] = _builder(settings, tokenizer, text)
        plans.append(Plan(subject, builders[key], settings))
    return plans


class Plan:
    """One model's part of the run."""

    def __init__(self, subject: Subject, builder: PromptBuilder, settings: Settings):
        self.subject, self.builder, self.grid = subject, builder, settings.grid
        self.longest = 0
        self.losses = subject.name
        length = settings.loss_length or max(settings.grid.lengths)
        self.windows: list[list[int]] = []
        if settings.loss:
            _check_positions(subject, length, settings, "--loss-length")
            ids = builder.haystack.ids
            self.windows = loss.windows(ids, length, settings.loss, settings.grid.seed)
            self.losses = f"{subject.name} {subject.weights} {length}"

    def check(self, kept: store.Store, settings: Settings) -> list[str]:
        """The keys of all samples, each of which can be built and is what was scored before."""
        keys = []
        for unit, sample in self.grid.each_sample(self.builder):
            _check_positions(self.subject, sample.positions, settings, "--lengths", unit.length)
            done = kept.done.get((self.subject.name, sample.key))
            if done and done["prompt_sha256"] != sample.digest:
                raise BadInput(
                    f"--out {settings.out} holds a sample of {sample.task} that another release "
                    "or tokenizer built otherwise: choose another folder"
                )
            keys.append(sample.key)
            self.longest = max(self.longest, sample.positions)
        return keys


def _check_positions(
    subject: Subject, needed: int, settings: Settings, option: str, length: int | None = None
) -> None:
    positions = subject.positions
    if positions is None or needed <= positions or settings.allow_extrapolation:
        return
    what = f"a prompt of {length} tokens and its answer take" if length else "a window takes"
    most = positions - (needed - length) if length else positions
    raise BadInput(
        f"{option}: {subject.name} was made for {positions} positions, and {what} {needed}: "
        f"expected a length up to {most}, or --allow-extrapolation, maybe with --rope"
    )
