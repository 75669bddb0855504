"""Samples as a data set, for other tools to run and score.

A row has the prompt twice: its ids, which are what has exactly `length` tokens, and their text.
Not every tokenizer gives the ids back from the text; `text_is_exact` says where it does.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_sigmoid import files
from hf_sigmoid.evals.encoding import written
from hf_sigmoid.evals.samples import Sample
from hf_sigmoid.evals.templates import parse

if TYPE_CHECKING:
    import datasets

ABOUT = "about.json"
BATCH_TOKENS = 2**20  # of prompts that are Python lists at one time
# `ruler` is RULER's name of the task, or null.
COLUMNS = {
    "task": "string", "ruler": "string", "length": "int32", "depth": "float64",
    "realised_depth": "float64", "seed": "int64", "index": "int64", "key": "string",
    "prompt_ids": ["int32"], "prompt": "string", "text_is_exact": "bool", "question": "string",
    "answer_prefix": "string", "answer": ["string"], "answer_ids": ["int32"],
    "answer_text": "string", "decoys": [["string"]],
    "needles": [
        {"start": "int32", "stop": "int32", "depth": "float64", "supports": "bool",
         "text": "string"}
    ],
}  # fmt: skip


def to_dataset(samples: Iterable[Sample], tokenizer: Any) -> "datasets.Dataset":
    """A row for each sample, in memory, 4 bytes a token and the text; writes no file.

    Args:
        samples: taken one by one, so that a generator never holds them all.
        tokenizer: the one that they were built with.

    Raises:
        ValueError: no samples.
        ImportError: datasets is not installed.
    """
    try:
        import pyarrow
        from datasets import Dataset, DatasetInfo
    except ImportError as error:
        raise ImportError(
            f"exporting samples needs the package {error.name or 'datasets'}: "
            "pip install 'hf-sigmoid[recipes]'"
        ) from error
    features = _features()
    tables = [
        pyarrow.Table.from_pylist(
            [_row(sample, tokenizer) for sample in batch], features.arrow_schema
        )
        for batch in _batches(samples)
    ]
    if not tables:
        raise ValueError("expected at least one sample to export, got none")
    return Dataset(pyarrow.concat_tables(tables), info=DatasetInfo(features=features))


def save(folder: Path, dataset: "datasets.Dataset", about: dict[str, Any]) -> None:
    """Write a data set for `load_from_disk`, and beside it what it is, whole or not at all.

    Args:
        about: the settings that the samples were made with, as JSON holds them.

    Raises:
        ValueError: a folder that exists and is not empty.
    """
    folder = Path(os.path.abspath(folder))
    files.check_new_folder(folder)
    said = json.dumps(about, indent=2, allow_nan=False) + "\n"
    with files.new_folder(folder) as temporary:
        dataset.save_to_disk(str(temporary))
        (temporary / ABOUT).write_text(said, encoding="utf-8")


def _features() -> "datasets.Features":
    from datasets import Features, List, Value

    def feature(kind: Any) -> Any:
        if isinstance(kind, list):
            return List(feature(kind[0]))
        if isinstance(kind, dict):
            return {name: feature(each) for name, each in kind.items()}
        return Value(kind)

    return Features(feature(COLUMNS))


def _row(sample: Sample, tokenizer: Any) -> dict[str, Any]:
    prompt = tokenizer.decode(sample.prompt, clean_up_tokenization_spaces=False)
    again = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    return {
        **{name: getattr(sample, name) for name in COLUMNS if hasattr(sample, name)},
        "ruler": parse(sample.task).ruler,
        "prompt_ids": sample.prompt,
        "prompt": prompt,
        "text_is_exact": again == sample.prompt,
        "answer": sample.answer_texts,
        "answer_ids": sample.answer,
        "answer_text": written(sample.answer_texts),
        "decoys": sample.decoy_texts,
        "needles": [vars(needle) for needle in sample.needles],
    }


def _batches(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """As many samples at a time as have so many tokens together."""
    batch: list[Sample] = []
    tokens = 0
    for sample in samples:
        batch.append(sample)
        tokens += len(sample.prompt)
        if tokens >= BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch
