"""The same questions to a model before its conversion and after it."""

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_sigmoid.conversions.compare import Measure, token_windows
from hf_sigmoid.conversions.haystack import Haystack, Sample
from hf_sigmoid.conversions.needles import found, prompts
from hf_sigmoid.conversions.reading import kind
from hf_sigmoid.conversions.stages import Stages


class Questions:
    """Windows of a text and prompts that hide a needle in it, made before any model is run.

    Args:
        lengths: in tokens; None takes 128, 256, 512 … up to `window`. Those up to `window` are the
            beginnings of the same windows, each longer one has windows of its own.
        needle: prompts at each of three depths for every length; 0 asks for no needle.
        positions: how many the converted model has; needles need room for their answer.

    Raises:
        ValueError: a text that is too short, or not one length at which a needle can be hidden.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        text: str,
        *,
        window: int,
        windows: int,
        lengths: Sequence[int] | None = None,
        needle: int = 0,
        positions: int | None = None,
    ):
        self.window = window
        self.lengths = default_lengths(window) if lengths is None else sorted({*lengths})
        self.windows = token_windows(tokenizer, text, window, windows, what="evaluation text")
        self.ids = {
            length: self.windows[:, :length]
            if length <= window
            else token_windows(tokenizer, text, length, windows, what="evaluation text")
            for length in sorted({*self.lengths, window})
        }
        self.prompts: dict[int, list[Sample]] = {}
        self.without_needle: dict[int, str] = {}
        if needle:
            self.prompts, self.without_needle = prompts(
                Haystack(text, tokenizer), self.lengths, needle, positions
            )
            if not self.prompts:
                raise ValueError(
                    f"no needle can be hidden: {'; '.join(self.without_needle.values())}"
                )


class Evaluation:
    """Asks a model before and after its conversion; what it says, for the report."""

    def __init__(self, questions: Questions, measure: Measure, stages: Stages):
        self.questions, self.measure, self.stages = questions, measure, stages
        self._before: tuple[dict, dict] = ({}, {})

    def before(self, model: PreTrainedModel) -> dict[str, float]:
        """Of the model as it was.

        Raises:
            ValueError: a needle cannot be asked of this kind of model.
        """
        if self.questions.prompts and kind(model) != "causal":
            raise ValueError(f"--needle asks causal language models, got {type(model).__name__}")
        self._before = self._by_length(model, "before"), self._needles(model, "before")
        if self.measure.of_features:
            return {}  # nothing to compare with
        return {"perplexity_before": self._before[0][self.questions.window]}

    def after(self, model: PreTrainedModel) -> dict:
        """Of the converted model, beside what it was; also `lengths` and `needle`, by length."""
        before, needles_before = self._before
        after, needles = self._by_length(model, "after"), self._needles(model, "after")
        key = "hidden_state_change" if self.measure.of_features else "perplexity_after"
        figures: dict = {
            key: after[self.questions.window],
            "lengths": [
                {"tokens": length, "before": before[length], "after": after[length]}
                for length in self.questions.lengths
            ],
        }
        if needles:
            figures["needle"] = [
                {
                    "tokens": length,
                    "samples": len(self.questions.prompts[length]),
                    **{f"{name}_before": value for name, value in needles_before[length].items()},
                    **{f"{name}_after": value for name, value in needles[length].items()},
                }
                for length in needles
            ]
            left_out = self.questions.without_needle
            figures["without_needle"] = {str(length): why for length, why in left_out.items()}
        return figures

    def start(self, model: PreTrainedModel, name: str) -> float:
        """One figure, on the windows alone, to choose a start by: the less, the better."""
        with self.stages(name, self.questions.windows.numel()):
            return self.measure(model, self.questions.windows, name)

    def _by_length(self, model: PreTrainedModel, when: str) -> dict[int, float]:
        by_length = {}
        for length, ids in self.questions.ids.items():
            with self.stages(f"evaluation {when}", ids.numel()):
                by_length[length] = self.measure(model, ids, f"{when}, {length} tokens")
        return by_length

    def _needles(self, model: PreTrainedModel, when: str) -> dict[int, dict[str, float]]:
        scores = {}
        for length, samples in self.questions.prompts.items():
            with self.stages(f"needles {when}", length * len(samples)):
                scores[length] = found(
                    model, samples, name=f"needles {when}", progress=self.measure.progress
                )
        return scores


def default_lengths(window: int) -> list[int]:
    """Powers of two from 128 below the window, and the window."""
    return [*(2**k for k in range(7, window.bit_length()) if 2**k < window), window]
