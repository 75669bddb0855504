"""The metric of `evaluate`, samples as a data set, and the texts that needles are hidden in."""

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from test_eval_tasks import TOKENIZERS, builder, tokenizer

from hf_sigmoid import text
from hf_sigmoid.evals import clopper_pearson, export, parse
from hf_sigmoid.evals.encoding import written
from hf_sigmoid.evals.metric import metric_path
from hf_sigmoid.text import sources

BYTES = "byte-level BPE"
WORD = {
    "byte-level BPE": ["Ġthe", "Ġ", "t", "h", "e"],
    "SentencePiece-like": ["▁the", "▁", "t", "h", "e"],
    "WordPiece-like": ["the", "t", "##h", "##e"],
}
CELLS = [
    ("single", 900, 0.5), ("multikey:3", 1100, 0.0), ("multivalue:4", 1100, None),
    ("vt", 900, 1.0), ("babi:2", 900, 0.3), ("cwe:3x8x2", 900, None),
]  # fmt: skip


@pytest.fixture(scope="module")
def metric(tmp_path_factory):
    import evaluate

    folder = tmp_path_factory.mktemp("metric")
    return evaluate.load(metric_path(), keep_in_memory=True, cache_dir=str(folder))


def made(kind: str, cells=CELLS, prompt: str = "base") -> list:
    return [
        builder(kind, prompt).build(task, length=length, depth=depth, index=index)
        for index, (task, length, depth) in enumerate(cells)
    ]


# The metric.

PARTS = st.lists(st.sampled_from(["7", "71", "Ab", "a b", "é"]), min_size=1, max_size=4)
BLANKS = st.sampled_from(["", " ", "\n", "  "])


@st.composite
def answered(draw) -> tuple[str, list[str], str]:
    """A prediction, its reference, its group; the prediction is often right, or nearly."""
    parts = draw(PARTS)
    right = written(tuple(parts))
    said = draw(
        st.sampled_from(
            [right, right + ".", right.upper(), ", ".join(parts), right[:-1], "no" + right, ""]
        )
    )
    return draw(BLANKS) + said + draw(BLANKS), parts, draw(st.sampled_from("xyz"))


def by_hand(rows: list[tuple[str, list[str], str]]) -> dict:
    exact, contained = 0, 0.0
    for said, parts, _ in rows:
        *first, last = parts
        joined = {0: last, 1: f"{parts[0]} and {last}"}.get(
            len(first), ", ".join(first) + f", and {last}"
        )
        exact += re.match(rf"\s*{re.escape(joined)}", said) is not None
        contained += len([part for part in parts if part.lower() in said.lower()]) / len(parts)
    return {
        "exact": pytest.approx(exact / len(rows)),
        "contains": pytest.approx(contained / len(rows)),
        "n": len(rows),
        "interval_95": pytest.approx(list(clopper_pearson(exact, len(rows)))),
    }


@settings(max_examples=50)
@given(st.lists(answered(), min_size=1, max_size=12))
def test_scores_are_those_of_a_plain_recomputation(metric, rows):
    said, parts, groups = (list(each) for each in zip(*rows, strict=True))
    assert metric.compute(predictions=said, references=parts) == by_hand(rows)
    result = metric.compute(predictions=said, references=parts, groups=groups)
    assert list(result["by_group"]) == list(dict.fromkeys(groups))
    for name, scores in result.pop("by_group").items():
        assert scores == by_hand([row for row in rows if row[2] == name])
    assert result == by_hand(rows)


@pytest.mark.parametrize(
    ("said", "parts", "exact", "contains"),
    [
        (" 12, 13, and 14. So", ["12", "13", "14"], 1, 1),
        ("12 and 13", ["12", "13"], 1, 1),
        ("12, 13", ["12", "13"], 0, 1),
        ("13 and 12", ["12", "13"], 0, 1),
        ("\n\tmuseum", ["museum"], 1, 1),
        ("Museum", ["museum"], 0, 1),
        ("in the museum", ["museum"], 0, 1),
        ("128", ["12"], 1, 1),
        ("only 12", ["12", "13", "14", "15"], 0, 0.25),
        ("", ["12"], 0, 0),
    ],
)
def test_an_answer_is_scored_as_the_card_says(metric, said, parts, exact, contains):
    result = metric.compute(predictions=[said], references=[parts])
    assert (result["exact"], result["contains"]) == (exact, contains)


def test_batches_are_scored_together(metric):
    metric.add_batch(predictions=["1", "2"], references=[["1"], ["1"]])
    metric.add(prediction="3", reference=["3"])
    result = metric.compute(groups=["a", "b", "a"])
    assert (result["exact"], result["n"]) == (pytest.approx(2 / 3), 3)
    assert result["by_group"]["a"]["interval_95"] == list(clopper_pearson(2, 2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"predictions": [], "references": []}, "at least one prediction, got none"),
        ({"predictions": ["a", None], "references": [["a"]] * 2}, "prediction 1: expected a text"),
        ({"predictions": ["a"], "references": ["a"]}, "Got a string but expected a list"),
        ({"predictions": ["a"], "references": [[]]}, r"reference 0: .* none of them empty, got \["),
        ({"predictions": ["a"], "references": [["a", " "]]}, "reference 0: expected parts"),
        ({"predictions": ["a"], "references": [["a"]] * 2}, "Mismatch"),
        (
            {"predictions": ["a"], "references": [["a"]], "groups": ["x", "y"]},
            "expected a group of each of the 1 samples, got 2",
        ),
    ],
)
def test_what_cannot_be_scored_is_named(given, message, tmp_path):
    import evaluate

    # Its own: after an error an instance may hold what it was given.
    own = evaluate.load(metric_path(), keep_in_memory=True, cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match=message):
        own.compute(**given)


def test_the_metric_needs_neither_network_nor_torch_and_writes_into_the_cache_only(tmp_path):
    code = (
        "import socket, sys\n"
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = classmethod(\n"
        "    lambda cls, name, *rest: None if name.startswith('torch') else find(name, *rest))\n"
        "def refuse(*given): raise AssertionError('the network was asked')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "import evaluate\n"
        "from hf_sigmoid.evals.metric import metric_path\n"
        "metric = evaluate.load(metric_path())\n"
        "print(metric.compute(predictions=['1'], references=[['1']])['exact'])\n"
        "assert 'torch' not in sys.modules\n"
    )
    folder = Path(metric_path())
    before = contents(folder)
    cache, work = tmp_path / "cache", tmp_path / "work"
    work.mkdir()
    environment = os.environ | {"HF_HOME": str(cache), "HF_EVALUATE_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=work, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-1] == "1.0"
    assert contents(folder) == before == ["README.md", "needle_score.py"]
    assert not contents(work) and any(cache.rglob("needle_score.py"))


def contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if "__pycache__" not in path.parts)


# The export.


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("prompt", ["base", "chat"])
def test_a_row_is_its_sample(kind, prompt):
    samples = made(kind, prompt=prompt)
    dataset = export.to_dataset(iter(samples), tokenizer(kind))
    assert len(dataset) == len(samples) and dataset.cache_files == []
    for row, sample in zip(dataset, samples, strict=True):
        assert row["prompt_ids"] == sample.prompt and len(row["prompt_ids"]) == row["length"]
        assert row["prompt"] == tokenizer(kind).decode(
            sample.prompt, clean_up_tokenization_spaces=False
        )
        again = tokenizer(kind)(row["prompt"], add_special_tokens=False)["input_ids"]
        assert row["text_is_exact"] == (again == sample.prompt)
        assert row["ruler"] == parse(sample.task).ruler
        same = [
            "task",
            "length",
            "depth",
            "realised_depth",
            "seed",
            "index",
            "key",
            "question",
            "answer_prefix",
        ]
        assert [row[name] for name in same] == [getattr(sample, name) for name in same]
        assert row["answer"] == list(sample.answer_texts) and row["answer_ids"] == sample.answer
        assert row["answer_text"] == written(sample.answer_texts)
        assert row["decoys"] == [list(each) for each in sample.decoy_texts]
        assert row["needles"] == [vars(needle) for needle in sample.needles]
    assert str(dataset.features["prompt_ids"]) == "List(Value('int32'))"
    assert {row["ruler"] for row in dataset} == {
        "niah_single_2", "niah_multikey_1", "niah_multivalue", "vt", None
    }  # fmt: skip
    # Special tokens are part of the text, so a chat's template can be seen in it.
    assert ("<assistant>" in dataset[0]["prompt"]) == (prompt == "chat")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_text_is_exact_if_it_is_encoded_to_the_prompt(kind):
    (sample,) = made(kind, CELLS[:1])
    encode = tokenizer(kind)
    # The same text in other tokens: a word that is one of them, letter by letter.
    word, *split = encode.convert_tokens_to_ids(WORD[kind])
    at = sample.prompt.index(word)
    assert encode.unk_token_id not in split
    other = replace(sample, prompt=sample.prompt[:at] + split + sample.prompt[at + 1 :])
    rows = export.to_dataset([sample, other], encode)
    assert rows["prompt"][0] == rows["prompt"][1]
    assert list(rows["text_is_exact"]) == [True, False]


def test_no_more_samples_are_held_than_a_batch_has_tokens_for(monkeypatch):
    monkeypatch.setattr(export, "BATCH_TOKENS", 2000)
    cells = [("single", 900, 0.5)] * 7
    taken = []

    def one_by_one():
        for sample in made(BYTES, cells):
            taken.append(sample.index)
            yield sample

    batches = list(map(len, export._batches(one_by_one())))
    assert batches == [3, 3, 1] and taken == list(range(7))
    whole = export.to_dataset(made(BYTES, cells), tokenizer(BYTES))
    assert whole["index"][:] == list(range(7))


def test_a_saved_data_set_loads_and_its_answers_are_right(metric, tmp_path):
    from datasets import load_from_disk

    about = {"seed": 0, "tasks": [task for task, _, _ in CELLS], "haystack": "das Café"}
    folder = tmp_path / "new" / "samples"
    export.save(folder, export.to_dataset(made(BYTES), tokenizer(BYTES)), about)
    assert json.loads((folder / "about.json").read_text()) == about
    loaded = load_from_disk(str(folder))
    groups = [f"{row['task']}/{row['length']}" for row in loaded]
    said = [tokenizer(BYTES).decode(ids) for ids in loaded["answer_ids"]]
    for predictions in (said, loaded["answer_text"]):
        result = metric.compute(predictions=predictions, references=loaded["answer"], groups=groups)
        assert result["exact"] == result["contains"] == 1 and result["n"] == len(CELLS)
        assert set(result["by_group"]) == set(groups)
    wrong = [written(tuple(decoys[0])) for decoys in loaded["decoys"]]
    result = metric.compute(predictions=wrong, references=loaded["answer"])
    assert result["exact"] == 0 and result["contains"] < 1


def test_the_same_samples_are_the_same_files(tmp_path):
    for name in "ab":
        export.save(tmp_path / name, export.to_dataset(made(BYTES), tokenizer(BYTES)), {})
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab"
    )
    assert first == second and len(first) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.fixture(scope="module")
def small():
    return export.to_dataset(made(BYTES, CELLS[:1]), tokenizer(BYTES))


def test_what_is_there_is_not_overwritten(small, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for taken in (tmp_path / "full", tmp_path / "full" / "notes.txt"):
        with pytest.raises(ValueError, match=r"must be a new or empty folder, got .*full"):
            export.save(taken, small, {})
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    export.save(tmp_path / "empty", small, {})
    assert (tmp_path / "empty" / "about.json").read_text() == "{}\n"
    assert (tmp_path / "empty").stat().st_mode == (tmp_path / "full").stat().st_mode


def test_a_failure_leaves_nothing(small, tmp_path, monkeypatch):
    with pytest.raises(TypeError, match="not JSON serializable"):
        export.save(tmp_path / "out", small, {"folder": tmp_path})
    monkeypatch.setattr(export.os, "replace", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export.save(tmp_path / "out", small, {})
    assert not list(tmp_path.iterdir())


def test_an_export_needs_samples_and_its_package(monkeypatch):
    with pytest.raises(ValueError, match="at least one sample to export, got none"):
        export.to_dataset([], tokenizer(BYTES))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"datasets: pip install 'hf-sigmoid\[recipes\]'"):
        export.to_dataset([], tokenizer(BYTES))


# The text that needles are hidden in; `test_text.py` has the formats.


def read(given, tokens: int = 40):
    return sources.read(given, text.austen, "haystack", tokenizer(BYTES), tokens)


def test_without_a_text_it_is_the_novel_whole():
    novel = read(None)
    assert (novel.name, novel.content) == ("the built-in novel", text.austen())
    assert novel.sha256 == hashlib.sha256(text.austen().encode()).hexdigest()


def test_a_name_is_without_the_folders_that_it_is_in(tmp_path, monkeypatch):
    folder = tmp_path / "my texts"
    (folder / "b").mkdir(parents=True)
    for name, said in (("c.txt", "third"), ("b/z.md", "sécond"), ("a.txt", "first")):
        (folder / name).write_text(said, encoding="utf-8")
    whole = read([str(folder)])
    assert (whole.name, whole.content) == ("my texts/", "first\n\nsécond\n\nthird")
    assert read([f"{folder}/"]) == read([f"{folder}/b/.."]) == whole
    rows = "".join(json.dumps({"text": f"Row {i} of all."}) + "\n" for i in range(90))
    (folder.parent / "rows.jsonl").write_text(rows)
    several = read([str(folder / "a.txt"), f"dataset:{folder.parent / 'rows.jsonl'}", str(folder)])
    assert several.name == "a.txt, dataset:rows.jsonl, my texts/"
    assert several.content.startswith("first\n\nRow 0 of all.\n\nRow 1")
    used = several.content.count("Row")
    assert 3 < used < 20  # as far as 40 tokens need
    (folder / "sets").mkdir()
    (folder.parent / "rows.jsonl").rename(folder / "sets" / "train.jsonl")
    monkeypatch.chdir(folder / "sets")
    assert read(["dataset:../sets"]).name == "dataset:sets"
    assert read([f"dataset:{folder / 'sets'}"], tokens=10**6).content.count("Row") == 90


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["nowhere.txt"], "^the haystack text: no such file: .*nowhere.txt"),
        (["blank.txt"], "^the haystack text must not be empty, got .*blank.txt"),
        (["."], "^the haystack text: .*bad.md is not UTF-8 text: it begins like UTF-16"),
        ([], "the haystack text must be a file, a folder or a data set, got none"),
        (["dataset:"], r"expected dataset:NAME\[:CONFIG"),
        (["dataset:./nowhere"], "cannot read dataset:./nowhere: there is no file or folder"),
        (["dataset:no such name!"], "the haystack text: cannot read dataset:no such name!: "),
    ],
)
def test_a_text_that_cannot_be_read_is_named(tmp_path, monkeypatch, given, message):
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "bad.md").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        read(given)
    assert "\n" not in str(error.value)
