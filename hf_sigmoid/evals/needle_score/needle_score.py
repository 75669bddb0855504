"""Answers to needle prompts, scored from their text.

    exact      share of predictions that begin with the answer as the task writes it
    contains   mean share of the answer's parts that occur in the prediction, in any case

`contains` is RULER's `string_match_all` (Hsieh et al. 2024, arXiv:2404.06654), as a share.
"""

import math
from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from hf_sigmoid.evals import clopper_pearson
from hf_sigmoid.evals.encoding import written

_CITATION = """\
@article{hsieh2024ruler,
  title={RULER: What's the Real Context Size of Your Long-Context Language Models?},
  author={Hsieh, Cheng-Ping and Sun, Simeng and Kriman, Samuel and Acharya, Shantanu and
          Rekesh, Dima and Jia, Fei and Zhang, Yang and Ginsburg, Boris},
  journal={arXiv preprint arXiv:2404.06654},
  year={2024}
}
"""
_INPUTS = """
Args:
    predictions: what the model wrote behind each prompt.
    references: the parts of each answer, in the order that the question states.
    groups: a name for each sample, such as "single/1024"; adds the scores of each group.

Returns:
    exact: share of predictions that begin with the answer as the task writes it.
    contains: mean share of the parts that occur in the prediction, in any case.
    n: number of samples.
    interval_95: [low, high] of exact, Clopper-Pearson.
    by_group: of each group the same four, if groups are given.
"""


class NeedleScore(evaluate.Metric):
    """The metric, as `evaluate.load` finds it."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {
                    "predictions": datasets.Value("string"),
                    "references": datasets.List(datasets.Value("string")),
                }
            ),
        )

    def _compute(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        groups: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        if not len(predictions):
            raise ValueError("expected at least one prediction, got none")
        for i, (prediction, parts) in enumerate(zip(predictions, references, strict=True)):
            if prediction is None:
                raise ValueError(f"prediction {i}: expected a text, got None")
            if not parts or not all(part and part.strip() for part in parts):
                raise ValueError(
                    f"reference {i}: expected parts of an answer, none of them empty, got {parts}"
                )
        scores = [_score(*each) for each in zip(predictions, references, strict=True)]
        result = _summary(scores)
        if groups is not None:
            if len(groups) != len(scores):
                raise ValueError(
                    f"expected a group of each of the {len(scores)} samples, got {len(groups)}"
                )
            members: dict[str, list[tuple[bool, float]]] = {}
            for name, score in zip(groups, scores, strict=True):
                members.setdefault(str(name), []).append(score)
            result["by_group"] = {name: _summary(each) for name, each in members.items()}
        return result


def _score(prediction: str, parts: Sequence[str]) -> tuple[bool, float]:
    """Two scores: does the prediction begin with the answer, and the share of parts it holds."""
    begins = prediction.strip().startswith(written(tuple(parts)).strip())
    said = prediction.lower()
    return begins, sum(part.lower() in said for part in parts) / len(parts)


def _summary(scores: Sequence[tuple[bool, float]]) -> dict[str, Any]:
    n, right = len(scores), sum(begins for begins, _ in scores)
    return {
        "exact": right / n,
        "contains": math.fsum(share for _, share in scores) / n,
        "n": n,
        "interval_95": list(clopper_pearson(right, n)),
    }
