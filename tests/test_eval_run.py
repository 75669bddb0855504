"""`hf-sigmoid eval` as a whole, on a two-layer llama that reads bytes."""

import argparse
import json
import math
import multiprocessing
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import releases
import torch
from safetensors.torch import load_file, save_file
from test_eval_tasks import TOKENIZERS
from test_eval_tasks import tokenizer as small_tokenizer
from training_runs import POSITIONS, launch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
)

import hf_sigmoid
from hf_sigmoid import loading, text
from hf_sigmoid.command_line import main as hf_sigmoid_command
from hf_sigmoid.embedded import checkpoint
from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals import commands, models, parse, run, settings
from hf_sigmoid.evals.attention import Observer
from hf_sigmoid.evals.models import EvaluatedModel
from hf_sigmoid.evals.prompts import PromptBuilder
from hf_sigmoid.evals.scoring import Scorer
from hf_sigmoid.evals.settings import Grid
from hf_sigmoid.rope import change_rope
from hf_sigmoid.run_lock import RunLock


def arguments(out: Path, *models: str | Path, **options: str) -> list[str]:
    """Two lengths, two depths, three samples; an option of "" is a switch."""
    grid = {"lengths": "300 340", "depths": "0 1", "samples": "3", "seed": "5"} | options
    words = [
        word
        for name, value in grid.items()
        for word in (f"--{name.replace('_', '-')}", *value.split())
    ]
    return ["--models", *map(str, models), *words, "--out", str(out)]


def variant(tiny: str, folder: Path, change=lambda model: None, model=None) -> Path:
    """The tiny model changed, or another one, with its tokenizer."""
    model = model or AutoModelForCausalLM.from_pretrained(tiny)
    change(model)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


def content(folder: Path) -> list[str]:
    return (folder / "samples.jsonl").read_text().splitlines(keepends=True)


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory) -> tuple[list[str], Path, dict]:
    """Arguments but for the folder, the folder, and the summary, of one model as two."""
    out = tmp_path_factory.mktemp("whole")
    more = {"tasks": "single multikey:2", "lengths": "480", "samples": "2", "loss": "2"}
    argv = arguments(
        out, tiny, attn="sdpa sigmoid", loss_length="200", attention="1", **more,
        score="teacher generate",
    )  # fmt: skip
    return argv[:-1], out, commands.main(argv)


def test_a_run_writes_every_sample_once_and_a_report_of_them(whole, tiny, capsys):
    argv, out, summary = whole
    samples = [json.loads(line) for line in content(out)]
    assert len(samples) == 2 * 2 * 2 * 2
    assert len({(sample["name"], sample["key"]) for sample in samples}) == len(samples)
    assert {sample["name"] for sample in samples} == {f"{tiny}@sdpa", f"{tiny}@sigmoid"}
    assert all(sample["prompt_tokens"] == sample["length"] == 480 for sample in samples)
    assert all(sample["logprob"] == sample["teacher"]["logprob"] < 0 for sample in samples)
    assert sum("attention" in sample for sample in samples) == 8  # the first of each cell
    assert json.loads((out / "summary.json").read_text()) == summary
    for name in ("cells.csv", "report.md", "report.html", "heatmap.png", "loss.png"):
        assert (out / name).stat().st_size > 500
    first, second = summary["models"]
    assert first["checks"]["passed"] and second["checks"]["passed"]
    cell = next(each for each in first["cells"] if each["task"] == "single" and not each["depth"])
    mine = [
        sample["logprob"]
        for sample in samples
        if sample["name"] == first["name"] and sample["task"] == "single" and not sample["depth"]
    ]
    assert cell["n"] == 2 and cell["logprob"] == pytest.approx(sum(mine) / 2)
    assert {pair["task"] for pair in summary["pairs"]} == {"single", "multikey:2"}
    assert first["loss"][-1]["stop"] == 199 and summary["loss_pairs"][0]["short"]["stop"] == 49
    assert first["attention"][0]["keys"] > 480 and len(first["attention"][0]["mass"]) == 2

    (shared,) = [each for each in first["tokens"] if each["task"] == "multikey:2"]
    assert shared["forwarded"] == sum(
        sample["tokens"]
        for sample in samples
        if sample["name"] == first["name"] and sample["task"] == "multikey:2"
    )
    # Done already: nothing is loaded, the report is the same.
    before = {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()}
    assert commands.main([*argv, str(out)]) == summary
    assert {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()} == before
    assert str(out / "report.html") in capsys.readouterr().out


def test_a_run_goes_on_in_the_middle_of_a_line_a_batch_and_a_model(whole, tmp_path):
    argv, out, summary = whole
    lines = content(out)
    (tmp_path / "samples.jsonl").write_text("".join(lines[:5]) + lines[5][:30])
    assert commands.main([*argv, str(tmp_path)]) == summary
    assert content(tmp_path) == lines

    # Another seed in the same folder would mix two experiments.
    with pytest.raises(BadInput, match="another seed, haystack"):
        commands.main([*argv, str(tmp_path), "--seed", "6"])
    assert content(tmp_path) == lines


def test_killed_at_any_moment_a_run_ends_as_if_it_had_not_been(whole, tmp_path):
    argv, out, _ = whole

    def child():
        torch.set_num_threads(1)
        commands.main([*argv, str(tmp_path)])

    rng, file = random.Random(0), tmp_path / "samples.jsonl"
    for _ in range(3):
        before = file.stat().st_size if file.exists() else 0
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        while process.is_alive() and not (file.exists() and file.stat().st_size > before):
            time.sleep(0.005)
        process.join(rng.uniform(0, 0.3))
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL and 1 < len(content(tmp_path)) < 16
    commands.main([*argv, str(tmp_path)])
    assert content(tmp_path) == content(out)
    assert (tmp_path / "summary.json").read_bytes() == (out / "summary.json").read_bytes()


def test_two_processes_write_what_one_does(whole, tmp_path):
    argv, out, _ = whole
    # What a killed run of three left behind, each with a line that is not whole.
    lines = content(out)
    (tmp_path / "samples.jsonl").write_text(lines[0])
    for rank in range(3):
        (tmp_path / f".samples-{rank}.jsonl").write_text(lines[3 + rank] + lines[6][:50])
    launch([*argv, str(tmp_path)], recipe="needle.py")
    for name in ("samples.jsonl", "summary.json", "report.html", "heatmap.png"):
        assert (tmp_path / name).read_bytes() == (out / name).read_bytes(), name
    assert not list(tmp_path.glob(".samples*"))


@pytest.fixture(scope="module")
def short(tiny, tmp_path_factory) -> tuple[list[str], list[str]]:
    """The arguments of a short evaluation, but for its folder, and the lines of its samples."""
    out = tmp_path_factory.mktemp("short")
    argv = arguments(out, tiny, lengths="300", depths="0")
    commands.main(argv)
    return argv[:-1], content(out)


@pytest.mark.parametrize(
    ("parts", "number"),
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
def test_a_samples_file_that_is_not_ours_is_left_alone(short, tmp_path, parts, number):
    argv, lines = short
    given = "".join(lines[each] if isinstance(each, int) else each for each in parts)
    (tmp_path / "samples.jsonl").write_text(given)
    with pytest.raises(BadInput, match=f"line {number} of .* is not a sample .*prompt_sha256"):
        commands.main([*argv, str(tmp_path)])
    assert (tmp_path / "samples.jsonl").read_text() == given
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("lost", [1, 2, 200], ids=["newline", "brace", "much"])
def test_a_last_line_without_its_newline_is_taken_again(short, tmp_path, lost):
    argv, lines = short
    (tmp_path / "samples.jsonl").write_text("".join(lines[:2])[:-lost])
    commands.main([*argv, str(tmp_path)])
    assert content(tmp_path) == lines


def test_more_samples_and_lengths_go_into_the_same_folder(short, tiny, tmp_path):
    argv, lines = short
    (tmp_path / "samples.jsonl").write_text("".join(lines))
    summary = commands.main([*argv, str(tmp_path), "--samples", "5", "--lengths", "300", "320"])
    assert content(tmp_path)[:3] == lines and len(content(tmp_path)) == 10
    assert [each["n"] for each in summary["models"][0]["lengths"]] == [5, 5]
    # And what is there already is a report of its own.
    less = commands.main([*argv, str(tmp_path)])
    assert [each["n"] for each in less["models"][0]["lengths"]] == [3]


def test_another_prompt_under_a_sample_s_key_is_refused(short, tmp_path):
    argv, lines = short
    other = json.loads(lines[0]) | {"prompt_sha256": "0" * 16}
    (tmp_path / "samples.jsonl").write_text(json.dumps(other) + "\n")
    with pytest.raises(BadInput, match="another release, tokenizer or text built otherwise"):
        commands.main([*argv, str(tmp_path)])


def test_samples_of_a_model_that_has_changed_are_not_kept(tiny, tmp_path):
    model = variant(tiny, tmp_path / "model")
    argv = arguments(tmp_path / "out", model, lengths="300", samples="1")
    commands.main(argv)
    variant(tiny, model, lambda made: made.model.norm.weight.data.mul_(2))
    with pytest.raises(BadInput, match="before its files changed"):
        commands.main(argv)


def test_the_current_folder_is_a_model_like_any_other(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tiny)
    commands.main(arguments(tmp_path, ".", lengths="300", depths="0", samples="1"))
    assert capsys.readouterr().out.splitlines()[1].split()[0] == Path(tiny).name


@pytest.mark.parametrize("attn", ["ssmax", "sigmoid"])
def test_a_backend_whose_n_is_off_under_a_cache_ends_the_run(tiny, tmp_path, monkeypatch, attn):
    """The planted bug: after a prompt of L tokens, n counts from the prompt's end."""
    slope = 0.3 if attn == "ssmax" else -1.0
    variant(
        tiny, tmp_path / "model", lambda m: hf_sigmoid.configure(m, attn, offset=0.5, slope=slope)
    )
    honest = hf_sigmoid.masks.visible_keys

    def wrong(mask, M, N, *rest):
        *found, log_n = honest(mask, M, N, *rest)
        return *found, (log_n.exp() - (N - M)).clamp(min=1).log()

    argv = arguments(tmp_path / "out", tmp_path / "model", lengths="300", samples="1")
    with monkeypatch.context() as patch:
        patch.setattr(hf_sigmoid.masks, "visible_keys", wrong)
        with pytest.raises(run.ChecksFailed, match=r"cached by .*cannot be believed"):
            commands.main(argv)
        assert not (tmp_path / "out").exists()
        assert commands.run(argv) == 1
        # What was scored of sound models before is reported.
        both = ["--models", tiny, *argv[1:-1], str(tmp_path / "two")]
        assert commands.run(both) == 1
        assert len(content(tmp_path / "two")) == 2
        assert (tmp_path / "two" / "report.html").exists()
        # Asked for all the same, the report says so first.
        summary = commands.main([*argv, "--checks", "record"])
        assert not summary["models"][0]["checks"]["passed"]
        assert "check" in (tmp_path / "out/report.md").read_text().lower().split("\n## ")[0]
    assert commands.main(arguments(tmp_path / "sound", tmp_path / "model", samples="1"))


def test_models_and_functions_are_crossed_and_named(tiny, tmp_path):
    summary = commands.main(
        arguments(tmp_path, tiny, f"{tiny}@ssmax", attn="sdpa eager", lengths="300", samples="1")
    )
    names = [f"{tiny}@sdpa", f"{tiny}@eager", f"{tiny}@ssmax"]
    assert [model["name"] for model in summary["models"]] == names
    assert [model["attn"] for model in summary["models"]] == ["sdpa", "eager", "ssmax"]


def test_bad_input_writes_nothing(tiny, damaged, pickled, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "short.txt").write_text("It rained. " * 9)
    end = AutoTokenizer.from_pretrained(tiny).eos_token
    (tmp_path / "marked.txt").write_text(f"It rained.{end} It stopped. " * 200)
    out = tmp_path / "out"
    for options, words in [
        ({"lengths": f"300 {POSITIONS}"}, "expected a length up to 50., or --allow-extrapolation"),
        ({"lengths": "60"}, "the fixed parts of single take .* got 60"),
        ({"lengths": "300", "loss": "2", "loss_length": "600"}, "--loss-length: .* 512 positions"),
        ({"lengths": "300", "loss": "5000"}, "--loss: 5000 windows of 300 tokens were asked"),
        ({"loss": "1", "loss_length": "1"}, "--loss-length: expected at least 2, got 1"),
        ({"depths": "0 50"}, "expected 0 to 1, got 50"),
        ({"samples": "0"}, "--samples: expected at least 1, got 0"),
        ({"decoys": "0"}, "--decoys: expected at least 1, got 0"),
        ({"batch_size": "0"}, "--batch-size: expected at least 1, got 0"),
        ({"attention": "-1"}, "--attention: expected at least 0, got -1"),
        ({"tasks": "single singel"}, "unknown task 'singel', did you mean 'single'"),
        ({"tasks": "cwe"}, "cwe:10x30x3 at 300 tokens: "),
        ({"prompt": "chat"}, "--prompt: .* has no chat template"),
        ({"haystack": str(tmp_path / "absent.txt")}, "--haystack: .*absent.txt"),
        ({"haystack": str(tmp_path / "empty.txt")}, "--haystack: .* must not be empty"),
        ({"haystack": str(tmp_path / "short.txt")}, "the haystack has .* give a longer text"),
        ({"haystack": str(tmp_path / "marked.txt")}, "holds special tokens"),
        ({"rope": "yarn"}, "--rope must be"),
        ({"device": "foo"}, "--device: expected one that torch can compute on here, got 'foo'"),
        ({"device": "meta"}, "got 'meta'"),
        ({"attn": "sigmoyd"}, "sigmoyd"),
    ]:
        with pytest.raises(BadInput, match=words):
            commands.main(arguments(out, tiny, **options))
    with pytest.raises(BadInput, match="--lengths: expected at least one"):
        commands.main(["--models", tiny, "--out", str(out)])
    for model, words in [
        (f"{tiny}@flash_attention_2", f"with attn flash_attention_2: {releases.NO_FLASH}"),
        (str(damaged), "expected whole weights, got a damaged model.safetensors"),
        (str(pickled), "pytorch_model.bin: pickles are not loaded"),
        (str(tmp_path), "cannot load it"),
    ]:
        with pytest.raises(BadInput, match=words):
            commands.main(arguments(out, tiny, model))
    for bad in ("empty.txt", "empty.txt/deep/out"):
        with pytest.raises(BadInput, match=r"--out .*empty\.txt is a file, expected a folder"):
            commands.main(arguments(tmp_path / bad, tiny))
    assert (tmp_path / "empty.txt").read_text() == "\n"
    assert not out.exists()


def test_an_evaluation_that_fails_before_its_first_sample_leaves_nothing(
    tiny, tmp_path, monkeypatch
):
    def refuse(*_, **__):
        raise BadInput("no model")

    monkeypatch.setattr("hf_sigmoid.evals.models.load_model", refuse)
    assert commands.run(arguments(tmp_path / "out", tiny)) == 2
    assert not (tmp_path / "out").exists()


def test_packages_that_a_report_needs_are_missed_before_any_work(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match=r"need scipy: pip install 'hf-sigmoid\[eval\]'"):
        commands.main(arguments(tmp_path / "out", tiny))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("checked", [True, False], ids=["here", "by transformers"])
def test_a_pickle_is_never_loaded(pickled, monkeypatch, checked):
    if not checked:
        monkeypatch.setattr(loading, "check_weights", lambda source: None)
    with pytest.raises(BadInput, match="safetensors"):
        loading.load_model(str(pickled), dtype=torch.float32)


def test_extrapolation_is_asked_for_and_recorded(tiny, tmp_path):
    argv = arguments(tmp_path / "a", tiny, lengths=str(POSITIONS + 40), samples="1", depths="0")
    (model,) = commands.main([*argv, "--allow-extrapolation"])["models"]
    assert model["lengths"][0]["n"] == 1 and model["extrapolates"]
    assert str(POSITIONS) in (tmp_path / "a/report.md").read_text()
    argv[-1] = str(tmp_path / "b")
    (model,) = commands.main([*argv, "--rope", "yarn:2"])["models"]
    assert model["positions"] == 2 * POSITIONS and not model["extrapolates"]
    assert model["name"] == f"{tiny}+yarn:2" and model["rope"] == "yarn:2"
    a, b = (json.loads(content(tmp_path / each)[0]) for each in "ab")
    assert a["prompt_sha256"] == b["prompt_sha256"] and a["logprob"] != b["logprob"]


def test_reports_of_folders_are_merged(whole, tiny, tmp_path, capsys):
    _, out, _ = whole
    for attn in ("sdpa", "sigmoid"):
        # As if run apart.
        shutil.copytree(out, tmp_path / attn)
        mine = [line for line in content(out) if f"@{attn}" in line]
        (tmp_path / attn / "samples.jsonl").write_text("".join(mine))
        held = json.loads((out / "run.json").read_text())
        held["models"] = [model for model in held["models"] if model["attn"] == attn]
        (tmp_path / attn / "run.json").write_text(json.dumps(held))
    for command in (["eval", "report"], ["eval", "report", "--out", str(tmp_path / "both")]):
        where = [str(tmp_path / "sdpa"), str(tmp_path / "sigmoid")]
        assert hf_sigmoid_command([*command, *where]) == (0 if "--out" in command else 2)
    assert "--out: expected a folder for the report of several" in capsys.readouterr().err
    for name in ("summary.json", "report.html", "loss.png"):
        assert (tmp_path / "both" / name).read_bytes() == (out / name).read_bytes(), name
    other = arguments(tmp_path / "other", tiny, lengths="300", depths="0", samples="1", seed="6")
    commands.main(other)
    with pytest.raises(BadInput, match=r"asked otherwise \(seed 5 and 6, scores"):
        commands.main(["report", str(out), str(tmp_path / "other"), "--out", str(tmp_path / "c")])
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(BadInput, match=r"expected a folder of an evaluation, found no run"):
            commands.main(["report", str(folder)])
    assert not (tmp_path / "c").exists()


def test_samples_are_built_as_a_data_set(tiny, tmp_path, capsys):
    from datasets import load_from_disk

    argv = ["eval", "build", "--tokenizer", tiny, "--lengths", "400", "--tasks", "single",
            "multikey:2", "--samples", "2", "--out", str(tmp_path / "made")]  # fmt: skip
    assert hf_sigmoid_command(argv) == 0
    made = load_from_disk(str(tmp_path / "made"))
    assert len(made) == 12 and {len(each) for each in made["prompt_ids"]} == {400}
    assert made["task"] == ["single"] * 6 + ["multikey:2"] * 6
    assert json.loads((tmp_path / "made/about.json").read_text())["prompt"] == "base"
    assert hf_sigmoid_command(argv) == 2
    assert "expected a new or empty folder" in capsys.readouterr().err


def test_two_runs_do_not_write_into_one_folder(short, tmp_path):
    argv, _ = short
    lock = RunLock(tmp_path, "--out")
    with pytest.raises(BadInput, match="another process is writing into it"):
        commands.main([*argv, str(tmp_path)])
    lock.release()
    commands.main([*argv, str(tmp_path)])
    assert not (tmp_path / ".lock").exists()


def test_more_windows_of_the_loss_are_the_same_ones_for_every_model(short, tiny, tmp_path):
    argv, _ = short
    argv = [*argv, str(tmp_path), "--loss-length", "200"]
    commands.main([*argv, "--loss", "3"])
    commands.main([*argv, "--loss", "5"])
    summary = commands.main([*argv, "--loss", "5", "--attn", "eager", "sdpa"])
    # In the order of this command, whatever was there before.
    assert [model["attn"] for model in summary["models"]] == ["eager", "sdpa"]
    (pair,) = summary["loss_pairs"]
    assert pair["first"].endswith("@eager")
    assert max(abs(band["mean"]) for band in pair["bands"]) < 1e-5
    # The first three were read once for each name of a model: unnamed, @eager, @sdpa.
    assert sorted(len(list(each.iterdir())) for each in (tmp_path / "loss").iterdir())[1:] == [5, 5]


def test_models_of_two_tokenizers_are_asked_of_their_own_prompts(tiny, tmp_path, capsys):
    words = small_tokenizer("WordPiece-like")  # which gives no capital back
    words.save_pretrained(tmp_path / "other")
    config = AutoModelForCausalLM.from_pretrained(tiny).config
    config.vocab_size = len(words)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    summary = commands.main(
        arguments(tmp_path / "out", tiny, tmp_path / "other", lengths="450", loss="1",
                  loss_length="100", prompt="base")
    )  # fmt: skip
    assert [model["lengths"][0]["n"] for model in summary["models"]] == [6, 6]
    assert {json.loads(line)["prompt_tokens"] for line in content(tmp_path / "out")} == {450}
    assert [model["round_trips"] for model in summary["models"]] == [True, False]
    assert "other: decoding its prompts does not give the text back" in capsys.readouterr().out
    # Other prompts and other tokens: nothing to pair.
    assert summary["pairs"] == [] and summary["loss_pairs"] == []


def test_a_part_of_a_composite_model_keeps_its_attention_function(tiny, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }  # fmt: skip
    more = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": len(tokenizer)}
    config = Gemma3Config(
        text_config={**sizes, **more, "initializer_range": 0.2},
        vision_config={**sizes, "image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4, image_token_id=1, boi_token_index=2, eoi_token_index=3,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration(config).eval()
    model.set_attn_implementation({"text_config": "sigmoid"})
    observer = Observer(model)
    builder = PromptBuilder(tokenizer, text.held_out())
    samples = [builder.build("single", length=400, depth=0.5, index=i) for i in range(2)]
    first, again = (Scorer(model, tokenizer).score(samples, observer=observer) for _ in range(2))
    assert first == again  # nothing was switched and left so
    seen = first[0]["attention"]
    assert seen["layers"] == [0, 1]
    assert max(abs(total - 1) for layer in seen["total"] for total in layer) > 0.01


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_rope_that_changes_within_a_prompt_is_refused(kind, tiny, tmp_path):
    config = AutoModelForCausalLM.from_pretrained(tiny).config
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
                 "original_max_position_embeddings": 400}  # fmt: skip
        config.max_position_embeddings = 1600
    else:
        config.max_position_embeddings = 400
    config.rope_parameters = rope
    variant(tiny, tmp_path / "model", model=AutoModelForCausalLM.from_config(config))
    argv = arguments(tmp_path / "out", tmp_path / "model", depths="0", samples="2", decoys="2")
    argv += ["--allow-extrapolation", "--lengths"]
    for length in ("398", "420", "700"):
        fits = kind == "longrope" and length == "700"
        if fits:
            commands.main([*argv, length])
            continue
        with pytest.raises(BadInput, match=r"the RoPE of .* changes at 400 positions"):
            commands.main([*argv, length])
    with pytest.raises(BadInput, match=r"--loss-length: the RoPE of .* got 410"):
        commands.main([*argv, "300", "--loss", "1", "--loss-length", "410"])
    commands.main([*argv, "300", "--out", str(tmp_path / "short")])


def test_learned_positions_do_not_extrapolate(tiny, tmp_path):
    config = GPT2Config(
        vocab_size=257, n_embd=32, n_layer=1, n_head=2, n_positions=400, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model = variant(tiny, tmp_path / "model", model=GPT2LMHeadModel(config))
    argv = arguments(tmp_path / "out", model, lengths="450", samples="1")
    with pytest.raises(BadInput, match=r"up to 39.: it has learned no others"):
        commands.main([*argv, "--allow-extrapolation"])


def test_weights_that_are_missing_are_not_made_up(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"lack model.layers.1.mlp.up_proj.weight"):
        commands.main(arguments(tmp_path / "out", tmp_path / "model", samples="1"))
    assert not (tmp_path / "out").exists()


def test_logits_that_are_no_numbers_end_the_run(tiny, tmp_path):
    model = variant(tiny, tmp_path / "m", lambda m: m.model.norm.weight.data.fill_(math.nan))
    argv = arguments(tmp_path / "out", model, samples="1", checks="record")
    with pytest.raises(run.ChecksFailed, match="not numbers"):
        commands.main(argv)


def test_yarn_sharpens_logits_unless_ssmax_does(tiny):
    models = {
        attn: EvaluatedModel.find(tiny, attn, "yarn:4").load(torch.float32, "cpu")
        for attn in ("sdpa", "ssmax")
    }
    factor = {attn: made.model.rotary_emb.attention_scaling for attn, made in models.items()}
    assert factor["ssmax"] == 1 and factor["sdpa"] == pytest.approx(0.1 * math.log(4) + 1)


def test_a_template_writes_one_day_and_takes_options(tiny, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = (
        "{{ strftime_now('%Y') }} {{ date_string }} {% if deep %}deep{% endif %}"
        "{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}<a>"
    )
    frames = [
        PromptBuilder(tokenizer, template_options=options).frame
        for options in ({}, {"deep": True}, {"date_string": "today"})
    ]
    assert frames == [
        ("2025 01 Jan 2025 <u>", "</u><a>"),
        ("2025 01 Jan 2025 deep<u>", "</u><a>"),
        ("2025 today <u>", "</u><a>"),
    ]
    shutil.copytree(tiny, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    argv = arguments(tmp_path / "out", tmp_path / "model", samples="1", lengths="400")
    summary = commands.main([*argv, "--template", "deep=true"])
    assert summary["models"][0]["prompt"] == "chat"
    with pytest.raises(BadInput, match="choose another folder"):
        commands.main(argv)


def test_most_of_a_shared_haystack_is_read_once(tiny, tmp_path):
    """At most a fifth of the tokens of RULER's way, as with the preset's depths and decoys."""
    argv = arguments(
        tmp_path, tiny, tasks="multikey:32", lengths="4000", depths="0 0.25 0.5 0.75 1",
        samples="6", decoys="4",
    )  # fmt: skip
    summary = commands.main([*argv, "--allow-extrapolation"])
    (cost,) = summary["models"][0]["tokens"]
    assert cost["harness"] == 30 * (4000 + 128) and cost["share"] <= 0.2


def test_a_narrower_run_forgets_nothing_of_the_folder(tiny, tmp_path):
    argv = arguments(tmp_path, tiny, lengths="300 540", depths="0", samples="1", loss="1")
    commands.main([*argv, "--loss-length", "100", "--allow-extrapolation"])
    again = arguments(tmp_path, tiny, lengths="300", depths="0", samples="2")
    (model,) = commands.main(again)["models"]
    assert not model["extrapolates"] and not model["loss"]
    (model,) = commands.main(["report", str(tmp_path)])["models"]
    assert model["extrapolates"] and model["loss"]
    assert [each["n"] for each in model["lengths"]] == [2, 1]


def test_what_a_stopped_run_left_can_be_reported(whole, tmp_path):
    _, out, _ = whole
    shutil.copytree(out, tmp_path / "stopped")
    lines = content(out)
    (tmp_path / "stopped/samples.jsonl").write_text("".join(lines[:3]))
    (tmp_path / "stopped/.samples-1.jsonl").write_text(lines[9] + lines[10][:40])
    next((tmp_path / "stopped/loss").rglob("*.safetensors")).unlink()
    argv = ["report", str(tmp_path / "stopped"), "--out", str(tmp_path / "report")]
    summary = commands.main(argv)
    assert sum(cell["n"] for model in summary["models"] for cell in model["cells"]) == 4
    assert summary["loss_pairs"] == []  # of one window against two
    assert content(tmp_path / "stopped") == lines[:3]


def test_models_of_another_configuration_are_not_carried_on(tiny, tmp_path):
    argv = arguments(tmp_path, tiny, lengths="300", depths="0", samples="1")
    commands.main([*argv, "--attn", "eager"])
    (tmp_path / "samples.jsonl").unlink()  # as if it had been stopped before its first
    commands.main([*argv, "--attn", "sdpa", "--decoys", "3"])
    held = json.loads((tmp_path / "run.json").read_text())
    assert [model["attn"] for model in held["models"]] == ["sdpa"]


def test_a_lock_that_is_removed_is_none(tmp_path):
    first = RunLock(tmp_path)
    with pytest.raises(BadInput, match="another process is writing into it"):
        RunLock(tmp_path)
    first.release(remove=True)
    assert not list(tmp_path.iterdir())
    second = RunLock(tmp_path)
    (tmp_path / RunLock.FILE).unlink()
    third = RunLock(tmp_path)  # of another file, which is the one to lock now
    second.release()
    with pytest.raises(BadInput, match="another process is writing into it"):
        RunLock(tmp_path)
    third.release(remove=True)


def test_a_table_of_positions_is_the_text_s_own(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    composite = Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config={**sizes, "num_attention_heads": 4, "head_dim": 8, "vocab_size": 50},
            vision_config={**sizes, "num_attention_heads": 4, "image_size": 16, "patch_size": 8},
            mm_tokens_per_image=4,
        )
    )
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1, n_positions=40))
    assert [models._learns_positions(each) for each in (composite, gpt2)] == [False, True]


def test_where_a_rope_changes_is_read_as_transformers_does():
    long = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096}
    long |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 8.0}
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    dynamic["original_max_position_embeddings"] = 4096
    found = [
        models._rope_switch(
            LlamaConfig(
                hidden_size=32, num_attention_heads=4, max_position_embeddings=32768,
                rope_parameters=rope,
            )
        )
        for rope in (None, long, dynamic)
    ]  # fmt: skip
    assert found == [(None, None), ("longrope", 4096), ("dynamic", 32768)]


def test_weights_of_other_sizes_and_a_rope_changed_before_are_bad_input(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "sizes")
    config = json.loads((tmp_path / "sizes/config.json").read_text())
    (tmp_path / "sizes/config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(BadInput, match="cannot load it"):
        EvaluatedModel.find(str(tmp_path / "sizes")).load(torch.float32, "cpu")
    variant(tiny, tmp_path / "changed", lambda model: change_rope(model, "theta:2"))
    with pytest.raises(BadInput, match="was changed already, by theta:2"):
        EvaluatedModel.find(str(tmp_path / "changed"), "ssmax", "yarn:4")


@pytest.mark.parametrize("preset", settings.PRESETS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_prompts_of_the_presets_fit(preset, kind, tmp_path):
    """Each task at its shortest length, where the small vocabularies' words take many tokens."""
    words = ["--models", "x", "--preset", preset, "--out", str(tmp_path)]
    parser = argparse.ArgumentParser()
    commands.add_arguments(parser)
    grid = commands.read(parser, words)[0].grid
    builder = PromptBuilder(small_tokenizer(kind), text.austen())
    # A tokenizer of 900 words writes three times as many tokens as one of 49,152.
    length = grid.lengths[0] * 3
    for spec in grid.specs:
        shortest = Grid((spec,), (length,), grid.depths, 1, shared=grid.shared)
        samples = list(shortest.samples_of(builder))
        assert len(samples) == (len(grid.depths) if spec.has_depth else 1)
        assert {len(sample.prompt) for sample in samples} == {length}


def test_a_haystack_is_repeated_where_that_is_asked_for(tiny, tmp_path):
    (tmp_path / "short.txt").write_text("It rained on the old town. A dog slept there. " * 3)
    argv = arguments(
        tmp_path / "out", tiny, lengths="480", depths="0", samples="2",
        haystack=str(tmp_path / "short.txt"),
    )  # fmt: skip
    with pytest.raises(BadInput, match="give a longer text"):
        commands.main(argv)
    summary = commands.main([*argv, "--repeat-haystack"])
    assert summary["haystack"] == "short.txt, repeated"
    # A longer prompt changes nothing of a shorter one.
    first = content(tmp_path / "out")
    commands.main([*argv, "--repeat-haystack", "--lengths", "480", "500"])
    assert content(tmp_path / "out")[: len(first)] == first


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("prompt", ["base", "chat"])
def test_questions_of_one_haystack_obey_every_rule_of_a_prompt(kind, prompt):
    builder = PromptBuilder(small_tokenizer(kind), text.held_out(), prompt=prompt)
    depths = [0.0, 0.3, 0.9]
    made = [
        builder.build_shared("multikey:8", length=2500, depths=depths, each=3, index=i)
        for i in range(2)
    ]
    for number, samples in enumerate(made):
        shared = samples[0].shared
        assert len(samples) == 9 and {sample.shared for sample in samples} == {shared}
        assert len({tuple(sample.prompt[:shared]) for sample in samples}) == 1
        assert {len(sample.prompt) for sample in samples} == {2500}
        assert len({sample.answer_texts for sample in samples}) == 9
        assert [sample.depth for sample in samples] == depths * 3
        assert {sample.index for sample in samples} == {3 * number + i for i in range(3)}
        assert samples[0].realised_depth == pytest.approx(depths[0], abs=1e-3)
        for sample in samples:
            (own,) = [needle for needle in sample.needles if needle.supports]
            assert sample.answer_texts[0] in own.text and own is sample.needles[sample.pivot]
            assert abs(own.depth - sample.depth) < 0.12
            inside = builder.encoder.tokenizer.decode(sample.prompt[own.start : own.stop])
            assert "".join(inside.split()).lower() == "".join(own.text.split()).lower()
            assert sample.answer not in sample.decoys and len(sample.decoys) == 8
    again = builder.build_shared("multikey:8", length=2500, depths=depths, each=3, index=1)
    assert again == made[1] and made[0][0].prompt != made[1][0].prompt
    with pytest.raises(ValueError, match="single has one question a haystack"):
        builder.build_shared("single", length=2500, depths=depths)
    with pytest.raises(ValueError, match="has 3 keys, expected 1 to 3 questions, got 6"):
        builder.build_shared("multikey:2", length=2500, depths=depths, each=2)
    with pytest.raises(ValueError, match="expected depths from 0 to 1 and each ≥ 1"):
        builder.build_shared("multikey:2", length=2500, depths=[2.0])


def test_a_grid_asks_for_as_many_samples_as_it_says(tiny):
    builder = PromptBuilder(AutoTokenizer.from_pretrained(tiny), text.held_out())
    for task, samples, haystacks in [("multikey:5", 4, 2), ("multikey:5", 6, 2), ("single", 5, 10)]:
        grid = Grid((parse(task),), (900,), (0.2, 0.8), samples, batch=3)
        made = list(grid.samples_of(builder))
        cells = [(sample.depth, sample.index) for sample in made]
        assert sorted(cells) == [(d, i) for d in (0.2, 0.8) for i in range(samples)]
        assert len({sample.haystack for sample in made}) == haystacks
        alone = Grid((parse(task),), (900,), (0.2, 0.8), samples, shared=False)
        assert len({sample.haystack for sample in alone.samples_of(builder)}) == 2 * samples


@pytest.mark.real
@pytest.mark.parametrize("length", [512, 2048])
def test_smollm2_finds_single_needles_with_softmax(length):
    """docs/evaluation has more of them: 95 % and over at each length."""
    source = checkpoint("smollm2")
    model = loading.load_model(source, dtype=torch.float32, attn="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(source)
    builder = PromptBuilder(tokenizer, decoys=2)
    samples = [builder.build("single", length=length, depth=depth) for depth in (0.0, 0.5, 1.0)]
    found = [result["teacher"] for result in Scorer(model, tokenizer).score(samples)]
    assert [(each["correct"], each["rank"]) for each in found] == [(True, 0)] * 3


def test_the_report_of_the_documentation_is_what_this_release_writes(tmp_path):
    """From the numbers that are committed beside it."""
    from hf_sigmoid.evals import report

    committed = Path(__file__).parents[1] / "docs/evaluation"
    summary = json.loads((committed / "summary.json").read_text())
    report.write(tmp_path, summary)
    for name in ("report.md", "cells.csv"):
        assert (tmp_path / name).read_text() == (committed / name).read_text()
    assert all(model["checks"]["passed"] for model in summary["models"])


def everything(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.mark.parametrize(
    ("name", "held", "words"),
    [
        ("thesis.txt", "mine", "is not empty and holds no evaluation"),
        (".env", "mine", "is not empty and holds no evaluation"),
        ("report.md", "# mine", "is not empty and holds no evaluation"),
        ("run.json", '{"lr": 1}', "run.json: expected what an evaluation writes there"),
        ("summary.json", "[1]", "summary.json: expected what an evaluation writes there"),
    ],
)
def test_a_folder_of_others_files_is_refused_before_any_work(
    tiny, whole, tmp_path, monkeypatch, name, held, words
):
    (tmp_path / "deep").mkdir()
    (tmp_path / name).write_text(held)
    before = everything(tmp_path)
    for work in ("plan.read_haystack", "summary.merged", "run.evaluate"):
        monkeypatch.setattr(f"hf_sigmoid.evals.{work}", lambda *given: pytest.fail("worked"))
    for argv in (arguments(tmp_path, tiny), ["report", str(whole[1]), "--out", str(tmp_path)]):
        with pytest.raises(BadInput, match=words):
            commands.main(argv)
    assert everything(tmp_path) == before


def test_a_folder_of_ours_takes_notes_and_reports(tiny, whole, tmp_path):
    argv, out, _ = whole
    shutil.copytree(out, tmp_path / "ours")
    (tmp_path / "ours" / "notes.txt").write_text("mine")
    commands.main([*argv, str(tmp_path / "ours")])
    for _ in range(2):  # the second takes the place of the first
        commands.main(["report", str(tmp_path / "ours"), "--out", str(tmp_path / "report")])
    for file in (RunLock.FILE, ".samples-1.jsonl", ".run.json"):  # as a killed run leaves
        (tmp_path / "killed").mkdir(exist_ok=True)
        (tmp_path / "killed" / file).touch()
    commands.main(arguments(tmp_path / "killed", tiny, samples="1", lengths="300"))
