"""The needle evaluation, on a two-layer llama that reads bytes."""

import json
from pathlib import Path

import pytest
import torch
from training_runs import POSITIONS
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sigmoid import loading

import needle  # isort: skip
import needle_report  # isort: skip
from errors import BadInput  # isort: skip

from hf_sigmoid import text
from hf_sigmoid.conversions.haystack import Haystack
from hf_sigmoid.evals import clopper_pearson


@pytest.fixture(scope="module")
def haystack(tiny) -> Haystack:
    return Haystack(text.held_out(), AutoTokenizer.from_pretrained(tiny))


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("length", [240, 300, 2000], ids=["barely", "short", "long"])
def test_prompts_have_exactly_the_length_and_depth_asked(haystack, length, depth):
    decode = haystack.tokenizer.decode
    for index in range(8):
        sample = haystack.sample(length=length, depth=depth, seed=3, index=index)
        assert len(sample.prompt) == length
        start, stop = sample.needle
        sentence = f" The special access code for {sample.city} is {sample.value}."
        assert decode(sample.prompt[start:stop]) == sentence
        assert decode(sample.prompt).count(sample.value) == 1
        assert decode(sample.prompt).endswith(f"access code for {sample.city} is")
        assert decode(sample.answer) == f" {sample.value}"
        assert sample.realised_depth == pytest.approx(depth, abs=0.5)
        if length == 2000:
            assert sample.realised_depth == pytest.approx(depth, abs=1e-3)
        # A sentence ends before the needle, or none has begun.
        assert decode(sample.prompt[:start]).rstrip("\"')")[-1] in ".!?:"


def test_samples_differ_and_do_not_depend_on_order(haystack):
    cell = {"length": 400, "depth": 0.5, "seed": 0}
    samples = [haystack.sample(**cell, index=i) for i in range(6)]
    assert len({tuple(sample.prompt) for sample in samples}) == 6
    assert haystack.sample(**cell, index=4) == samples[4]
    assert haystack.sample(**cell | {"seed": 1}, index=4) != samples[4]


@pytest.mark.parametrize("length", [60, 10**6], ids=["shorter than the question", "longer"])
def test_a_length_that_cannot_be_built_is_an_error(haystack, length):
    with pytest.raises(ValueError, match="expected"):
        haystack.sample(length=length, depth=0.5, seed=0, index=0)


def test_the_score_is_that_of_greedy_decoding(tiny, haystack):
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    made = haystack.sample(length=260, depth=0.5, seed=0, index=0)
    ids = torch.tensor([made.prompt])
    greedy = model.generate(ids, do_sample=False, max_new_tokens=5, min_new_tokens=5)
    said = greedy[0, 260:].tolist()
    wrong = [*said[:2], (said[2] + 1) % 256, *said[3:]]
    answers = [said, wrong, said[:3]]
    samples = [type(made)(**{**vars(made), "answer": answer}) for answer in answers]
    right, changed, shorter = needle.score_answers(model, samples)
    assert right["correct"] and shorter["correct"] and not changed["correct"]
    with torch.no_grad():
        logprobs = model(greedy).logits[0, 259:-1].log_softmax(-1)
    expected = logprobs[range(5), said].mean().item()
    assert right["logprob"] == pytest.approx(expected, rel=1e-4)


def needle_arguments(out: Path, *models: str, **options: str) -> list[str]:
    grid = {"lengths": "250 300", "depths": "0 1", "samples": "3", "seed": "5"} | options
    words = [word for name, value in grid.items() for word in (f"--{name}", *value.split())]
    return ["--models", *models, *words, "--out", str(out)]


def test_a_stopped_evaluation_goes_on_where_it_was(tiny, tmp_path, capsys):
    models = (f"{tiny}@sdpa", f"{tiny}@sigmoid")
    summary = needle.main(needle_arguments(tmp_path / "a", *models))
    lines = (tmp_path / "a" / "samples.jsonl").read_text().splitlines(keepends=True)
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 2 * 2 * 2 * 3
    assert {sample["attn"] for sample in samples} == {"sdpa", "sigmoid"}
    assert all(sample["prompt_tokens"] == sample["length"] for sample in samples)
    assert all(sample["logprob"] < 0 and sample["correct"] in (True, False) for sample in samples)
    assert json.loads((tmp_path / "a" / "summary.json").read_text()) == summary
    cell = summary["models"][0]["cells"][0]
    first = [s["logprob"] for s in samples[:3]]
    assert cell["n"] == 3 and cell["logprob"] == pytest.approx(sum(first) / 3)
    assert (tmp_path / "a" / "heatmap.png").read_bytes()[:4] == b"\x89PNG"
    assert str(tmp_path / "a" / "heatmap.png") in capsys.readouterr().out

    # Stopped in the middle of a line, of a batch, and of a model.
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "samples.jsonl").write_text("".join(lines[:7]) + lines[7][:30])
    assert needle.main(needle_arguments(tmp_path / "b", *models)) == summary
    assert (tmp_path / "b" / "samples.jsonl").read_text() == "".join(lines)

    # Another seed in the same folder would mix two experiments.
    with pytest.raises(BadInput, match="another task, seed"):
        needle.main(needle_arguments(tmp_path / "b", *models, seed="6"))
    assert (tmp_path / "b" / "samples.jsonl").read_text() == "".join(lines)


@pytest.fixture(scope="module")
def evaluated(tiny, tmp_path_factory) -> tuple[list[str], list[str]]:
    """The arguments of an evaluation, but for its folder, and the lines of its samples."""
    out = tmp_path_factory.mktemp("evaluated")
    argv = needle_arguments(out, tiny, lengths="250", depths="0", samples="3")
    needle.main(argv)
    return argv[:-1], (out / "samples.jsonl").read_text().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("content", "number"),
    [
        (["my notes\n", 0, 1], 1),
        ([0, 1, "my notes"], 3),
        ([0, "{broken\n", 1, 2], 2),
        ([0, "\n", 1], 2),
        (['{"score": 1}\n'], 1),
        (["[1, 2]\n"], 1),
        ([0, '{"score": 1}'], 2),
    ],
    ids=["first", "last", "middle", "blank", "another object", "no object", "unended object"],
)
def test_a_samples_file_that_is_not_ours_is_left_alone(evaluated, tmp_path, content, number):
    argv, lines = evaluated
    content = "".join(lines[each] if isinstance(each, int) else each for each in content)
    (tmp_path / "samples.jsonl").write_text(content)
    with pytest.raises(BadInput, match=f"line {number} of .* is not a sample .*logprob"):
        needle.main([*argv, str(tmp_path)])
    assert (tmp_path / "samples.jsonl").read_text() == content
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("lost", [1, 2, 200], ids=["newline", "brace", "much"])
def test_a_last_line_without_its_newline_is_taken_again(evaluated, tmp_path, lost):
    argv, lines = evaluated
    (tmp_path / "samples.jsonl").write_text("".join(lines[:2])[:-lost])
    needle.main([*argv, str(tmp_path)])
    assert (tmp_path / "samples.jsonl").read_text() == "".join(lines)


def test_models_are_named_by_as_much_of_their_paths_as_it_takes(tmp_path, monkeypatch):
    def names(*models):
        return needle_report.short_names([{"model": str(model)} for model in models])

    (tmp_path / "x" / "m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "x")
    assert names("w/x/m", "w/y/m", "smollm2") == ["x/m", "y/m", "smollm2"]
    assert names("a/x/k", "b/x/k", "k") == ["a/x/k", "b/x/k", "k"]
    assert names("a/final", "b/a/final", "b/final") == ["a/final", "b/a/final", "b/final"]
    assert names("m", "m", tmp_path / "x" / "m") == ["m", "m", "m"]  # one model, asked thrice
    assert names(".", "..") == ["x", tmp_path.name]


def test_the_current_folder_is_a_model_like_any_other(tiny, evaluated, tmp_path, monkeypatch):
    monkeypatch.chdir(tiny)
    argv = needle_arguments(tmp_path, ".", lengths="250", depths="0", samples="1")
    summary = needle.main(argv)
    assert needle_report.table(summary).splitlines()[1].split()[0] == Path(tiny).name


def test_samples_of_a_model_that_has_changed_are_not_kept(tiny, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "model")
    argv = needle_arguments(tmp_path / "out", str(tmp_path / "model"), lengths="250", samples="1")
    model.save_pretrained(tmp_path / "model")
    needle.main(argv)
    model.model.norm.weight.data.mul_(2)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(BadInput, match="before its files changed"):
        needle.main(argv)


def test_bad_needle_input_writes_nothing(tiny, damaged, pickled, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    for options, words in [
        ({"lengths": f"250 {POSITIONS}"}, "--allow-extrapolation"),
        ({"depths": "0 50"}, "expected 0 to 1, got 50"),
        ({"samples": "0"}, "at least 1, got 0"),
        ({"haystack": str(tmp_path / "absent.txt")}, "absent.txt"),
        ({"haystack": str(tmp_path / "empty.txt")}, "is empty"),
        ({"device": "foo"}, "--device: expected one that torch can compute on here, got 'foo'"),
        ({"device": "meta"}, "got 'meta'"),
    ]:
        with pytest.raises(BadInput) as error:
            needle.main(needle_arguments(tmp_path / "out", tiny, **options))
        assert words in str(error.value)
    with pytest.raises(BadInput, match="sigmoyd"):
        needle.main(needle_arguments(tmp_path / "out", f"{tiny}@sigmoyd"))
    for model, words in [
        (f"{tiny}@flash_attention_2", "with attn flash_attention_2: FlashAttention2"),
        (str(damaged), "expected whole weights, got a damaged model.safetensors"),
        (str(pickled), "pytorch_model.bin: pickles are not loaded"),
    ]:
        with pytest.raises(BadInput, match=words):
            needle.main(needle_arguments(tmp_path / "out", tiny, model))
    for out in ("empty.txt", "empty.txt/deep/out"):
        with pytest.raises(BadInput, match=r"--out .*empty\.txt is a file, expected a folder"):
            needle.main(needle_arguments(tmp_path / out, tiny))
    assert (tmp_path / "empty.txt").read_text() == "\n"
    assert not (tmp_path / "out").exists()


def test_an_evaluation_that_fails_before_its_first_sample_leaves_nothing(
    tiny, tmp_path, monkeypatch
):
    def refuse(*_, **__):
        raise BadInput("no model")

    monkeypatch.setattr(needle, "load_model", refuse)
    with pytest.raises(BadInput, match="no model"):
        needle.main(needle_arguments(tmp_path / "out", tiny))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("checked", [True, False], ids=["here", "by transformers"])
def test_a_pickle_is_never_loaded(pickled, monkeypatch, checked):
    if not checked:
        monkeypatch.setattr(loading, "check_weights", lambda source: None)
    with pytest.raises(BadInput, match="safetensors"):
        loading.load_model(str(pickled), dtype=torch.float32)


def test_extrapolation_is_allowed_when_asked_for(tiny, tmp_path):
    argv = needle_arguments(tmp_path, tiny, lengths=str(POSITIONS + 40), samples="1")
    (model,) = needle.main([*argv, "--allow-extrapolation"])["models"]
    assert model["lengths"][0]["n"] == 2


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [
        (10, 10, (0.6915, 1)),
        (0, 20, (0, 0.1684)),
        (5, 10, (0.1871, 0.8129)),
        (50, 2000, (0.018611, 0.032818)),
    ],
)
def test_the_interval_is_clopper_and_pearsons(successes, trials, expected):
    assert clopper_pearson(successes, trials) == pytest.approx(expected, abs=1e-4)


def test_the_held_out_chapters_are_not_trained_on():
    assert text.train() + text.held_out() == text.austen()
    assert 0.1 < len(text.held_out()) / len(text.austen()) < 0.2
    assert [c.split("\n")[0] for c in text.chapters(text.held_out())] == [
        f"CHAPTER {n}" for n in range(25, 29)
    ]
