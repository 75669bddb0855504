"""From scored samples to the numbers of a report: cells, margins, pairs, costs, attention, loss.

Intervals are exact for independent samples, which questions of one haystack are not quite:
`haystacks` says how many there are. Pairs compare answers to the same prompts, against the first
model.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals import store
from hf_sigmoid.evals.attention import FIELDS
from hf_sigmoid.evals.loss import Losses
from hf_sigmoid.evals.statistics import (
    block_bootstrap,
    clopper_pearson,
    effective_length,
    log_edges,
    mcnemar,
)
from hf_sigmoid.evals.templates import parse

Sampled = dict[str, Any]

# New tokens that RULER has a model write for its tasks, and lm-evaluation-harness after it, behind
# a prompt that each sample reads from its beginning.
HARNESS_STEPS = {"vt": 30, "cwe": 120, "fwe": 50}
HARNESS_STEPS |= dict.fromkeys(("single", "multikey", "multivalue", "multiquery", "passkey"), 128)


def merged(folders: Sequence[Path]) -> dict[str, Any]:
    """The summary of all samples of some folders.

    Raises:
        BadInput: folders without samples, or of evaluations that asked otherwise.
    """
    samples: dict[store.Key, Sampled] = {}
    models: dict[str, dict[str, Any]] = {}
    losses: dict[str, Any] = {}
    first = None
    for folder in folders:
        if (held := store.read(folder)) is None:
            raise BadInput(f"{folder}: expected a folder of an evaluation, found no run.json in it")
        first = first or held
        if held["config"] != first["config"]:
            differing = [
                f"{key} {first[key]!r} and {held[key]!r}"
                for key in ("seed", "haystack", "dtype", "device", "scores")
                if first[key] != held[key]
            ]
            raise BadInput(
                f"{folders[0]} and {folder} hold evaluations that asked otherwise "
                f"({', '.join(differing) or 'prompts or decoys'}): they cannot be compared"
            )
        for model in held["models"]:
            name = model["name"]
            known = models.setdefault(name, model | {"windows": []})
            if known["weights"] != model["weights"]:
                raise BadInput(f"{folder}: {name} has other weights than in another folder")
            if known["checks"] and known["checks"]["passed"] and not model["checks"]["passed"]:
                known["checks"] = model["checks"]
            known["extrapolates"] |= model["extrapolates"]
            if model["windows"] and name not in losses:
                written = Losses(folder, [name, model["weights"], held["config"]])
                known["windows"] = written.known(model["windows"])
                losses[name] = written.read(known["windows"])
        for key, sample in store.Store(folder, held, {}).done.items():
            samples.setdefault(key, sample)
    if not samples:
        raise BadInput(f"{folders[0]}: expected samples of an evaluation, found none")
    about = {key: value for key, value in first.items() if key != "models"}
    return summarise(list(samples.values()), list(models.values()), about, losses)


def summarise(
    samples: Sequence[Sampled],
    models: Sequence[dict[str, Any]],
    about: dict[str, Any],
    losses: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of `summary.json`.

    Args:
        samples: of all models, lines of samples.jsonl.
        models: as run.json describes them; the first is what the others are compared to.
        about: of the run: configuration, seed, haystack, …
        losses: by model's name, `[windows, positions]`, or None.
    """
    mine = {model["name"]: [] for model in models}
    for sample in samples:
        mine.get(sample["name"], []).append(sample)
    models = [model for model in models if mine[model["name"]]]
    base, *others = models or [None]
    seed = about["seed"]
    shortest = _shortest(mine.values())
    found = []
    for model in models:
        own = mine[model["name"]]
        pooled = _grouped(own, "task", "length")
        found.append(
            {
                **{key: value for key, value in model.items() if key != "windows"},
                "cells": _grouped(own, "task", "length", "depth"),
                "lengths": pooled,
                "effective": _effective(pooled, shortest),
                "tokens": _tokens(own),
                "attention": _attention(own),
                "loss": _bands(losses.get(model["name"]), None, seed),
            }
        )
    pairs = [
        pair
        for other in others
        for pair in _pairs(base["name"], mine[base["name"]], other["name"], mine[other["name"]])
    ]
    costs = [_loss_pair(base, other, losses, seed) for other in others]
    return {
        **about,
        "tasks": _distinct(samples, "task"),
        "lengths": sorted(_distinct(samples, "length")),
        "depths": sorted(each for each in _distinct(samples, "depth") if each is not None),
        "models": found,
        "pairs": pairs,
        "loss_pairs": [cost for cost in costs if cost is not None],
    }


def _distinct(samples: Iterable[Sampled], key: str) -> list:
    return list(dict.fromkeys(sample[key] for sample in samples))


def _groups(samples: Iterable[Sampled], *by: str) -> dict[tuple, list[Sampled]]:
    """In the order of the first task, then by the other keys."""
    groups: dict[tuple, list[Sampled]] = {}
    for sample in samples:
        groups.setdefault(tuple(sample[key] for key in by), []).append(sample)
    tasks = list(dict.fromkeys(task for task, *_ in groups))
    order = sorted(groups, key=lambda k: (tasks.index(k[0]), *(each or 0 for each in k[1:])))
    return {key: groups[key] for key in order}


def _grouped(samples: Sequence[Sampled], *by: str) -> list[dict[str, Any]]:
    return [
        {**dict(zip(by, key, strict=True)), "ruler": parse(key[0]).ruler, **_pooled(group)}
        for key, group in _groups(samples, *by).items()
    ]


def _pooled(samples: Sequence[Sampled]) -> dict[str, Any]:
    n, correct = len(samples), sum(sample["correct"] for sample in samples)
    taught = [sample["teacher"] for sample in samples if "teacher" in sample]
    written = [sample["generate"] for sample in samples if "generate" in sample]
    generated = {
        "correct": sum(each["correct"] for each in written),
        "contains": math.fsum(each["contains"] for each in written) / n,
    }
    return {
        "n": n,
        "haystacks": len(_distinct(samples, "haystack")),
        "correct": correct,
        "accuracy": correct / n,
        "interval_95": list(clopper_pearson(correct, n)),
        "logprob": math.fsum(each["logprob"] for each in taught) / n if taught else None,
        "first": sum(each["rank"] == 0 for each in taught) / n if taught else None,
        "candidates": max((each["candidates"] for each in taught), default=None),
        "generated": generated if written else None,
    }


def _shortest(each: Iterable[Sequence[Sampled]]) -> dict[str, int | None]:
    """The length by task that all models are held to: the shortest that every one was asked at."""
    lengths: dict[str, list[set[int]]] = {}
    for samples in each:
        for (task,), group in _groups(samples, "task").items():
            lengths.setdefault(task, []).append(set(_distinct(group, "length")))
    return {task: min(set.intersection(*found), default=None) for task, found in lengths.items()}


def _effective(
    pooled: Sequence[dict[str, Any]], shortest: dict[str, int | None]
) -> dict[str, int | None]:
    """Effective lengths by task; None where nothing is longer than what it would be held to."""
    found = {}
    for (task,), cells in _groups(pooled, "task").items():
        base = shortest[task]
        counts = {
            cell["length"]: (cell["correct"], cell["n"])
            for cell in cells
            if base and cell["length"] >= base
        }
        found[task] = effective_length(counts) if len(counts) > 1 else None
    return found


def _tokens(samples: Sequence[Sampled]) -> list[dict[str, Any]]:
    """Tokens forwarded for each task, beside those of RULER's way."""
    found = []
    for (task,), group in _groups(samples, "task").items():
        forwarded = sum(sample["tokens"] for sample in group)
        steps = HARNESS_STEPS.get(parse(task).kind)
        harness = sum(sample["length"] + steps for sample in group) if steps else None
        share = forwarded / harness if harness else None
        found.append({"task": task, "forwarded": forwarded, "harness": harness, "share": share})
    return found


def _attention(samples: Sequence[Sampled]) -> list[dict[str, Any]]:
    """Means over the samples that were watched, by task and length."""
    watched = [sample for sample in samples if "attention" in sample]
    found = []
    for (task, length), group in _groups(watched, "task", "length").items():
        seen = [sample["attention"] for sample in group]
        means = {
            field: [
                [math.fsum(values) / len(seen) for values in zip(*layer, strict=True)]
                for layer in zip(*(each[field] for each in seen), strict=True)
            ]
            for field in FIELDS
        }
        keys = math.fsum(each["keys"] for each in seen) / len(seen)
        about = {"layers": seen[0]["layers"], "keys": keys}
        found.append({"task": task, "length": length, "n": len(seen), **means, **about})
    return found


def _pairs(
    first: str, one: Sequence[Sampled], second: str, other: Sequence[Sampled]
) -> list[dict[str, Any]]:
    """McNemar's test by task, at each length and over all, of the samples both were asked."""

    def asked(sample: Sampled) -> tuple[str, str]:
        # Another tokenizer or template makes another prompt under the same key: no pair.
        return sample["key"], sample["prompt_sha256"]

    right = {asked(sample): sample["correct"] for sample in other}
    both = [sample for sample in one if asked(sample) in right]
    found = []
    for by in (("task",), ("task", "length")):
        for (task, *length), group in _groups(both, *by).items():
            answers = [sample["correct"] for sample in group], [right[asked(s)] for s in group]
            about = {"task": task, "length": length[0] if length else None}
            found.append({"first": first, "second": second, **about, **vars(mcnemar(*answers))})
    return found


def _bands(losses: Any, edges: Sequence[int] | None, seed: int) -> list[dict[str, Any]]:
    """Bands between some edges; None: even ones in log position."""
    if losses is None:
        return []
    array = np.asarray(losses)
    generator = np.random.default_rng(seed)
    found = block_bootstrap(array, edges or log_edges(array.shape[1]), generator=generator)
    return [vars(band) for band in found]


def _loss_pair(
    first: dict[str, Any], second: dict[str, Any], losses: Mapping[str, Any], seed: int
) -> dict[str, Any] | None:
    """Second minus first on the same tokens; what short contexts cost and long ones gain.

    None of windows of different tokens. Short are the positions that the first model was made for,
    and long those beyond; of windows that do not go beyond, the first quarter and the second half.
    """
    one, two = losses.get(first["name"]), losses.get(second["name"])
    if one is None or two is None or first["windows"] != second["windows"]:
        return None
    difference = np.asarray(two, dtype=np.float64) - np.asarray(one, dtype=np.float64)
    length, positions = difference.shape[1], first["positions"]
    beyond = positions is not None and positions < length
    short, long = (positions, positions) if beyond else (max(1, length // 4), length // 2)
    return {
        "first": first["name"],
        "second": second["name"],
        "bands": _bands(difference, None, seed),
        "short": _bands(difference, [0, short], seed)[0],
        "long": _bands(difference, [long, length], seed)[0],
    }
