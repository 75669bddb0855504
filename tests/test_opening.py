"""The first lines of a run, and launches that start something else than they were asked for."""

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from training_runs import RECIPES, arguments
from transformers import AutoTokenizer

from hf_sigmoid.training import train  # isort: skip
from hf_sigmoid.training import corpus  # isort: skip
from hf_sigmoid.training import opening  # isort: skip
from hf_sigmoid.training import layout  # isort: skip
from hf_sigmoid.training import processes  # isort: skip
from hf_sigmoid.errors import BadInput  # isort: skip
from hf_sigmoid.training.run_keys import Data  # isort: skip


def first_lines(capsys) -> list[str]:
    return capsys.readouterr().out.splitlines()[:3]


def test_a_run_begins_by_saying_what_it_is(tiny, corpus_file, tmp_path, capsys):
    keys = {"attn": "ssmax", "train.steps": 20, "checkpoint.every": 0}
    train.main(["--dry-run", *arguments(tiny, corpus_file, tmp_path, **keys)])
    planned = first_lines(capsys)
    train.main(arguments(tiny, corpus_file, tmp_path, **keys))
    encode = corpus.encoder(AutoTokenizer.from_pretrained(tiny), True)
    documents = corpus.open_corpus(Data(path=corpus_file)).sources[0]
    tokens = sum(len(encode(document)) for document in documents)
    read = 20 * 4 * 48
    model, trains, texts = first_lines(capsys)
    assert model == f"model {tiny}: LlamaForCausalLM, attention ssmax, one process on cpu, float32"
    assert trains.startswith("train.parameters=all: ") and trains.endswith("train (100.00%)")
    assert texts == (
        f"text documents.jsonl: 40 documents, {tokens:,} tokens; this run reads {read:,}, "
        f"{read / tokens:.3g} times over"
    )
    assert planned == [model, trains, texts]


def test_of_what_does_not_all_train_the_kind_is_said(tiny, corpus_file, tmp_path, capsys):
    keys = {"attn": "ssmax", "train.steps": 1, "train.precision": "bf16"}
    for more, kind in (
        ({"train.parameters": "log_length"}, "log_length: 16 of "),
        ({"lora.rank": 2}, "lora: "),
    ):
        argv = arguments(tiny, corpus_file, tmp_path / kind[:4], **keys, **more)
        train.main(argv)
        model, trains, texts = first_lines(capsys)
        assert "LlamaForCausalLM, " in model and "bfloat16 autocast over float32 weights" in model
        assert trains.startswith(f"train.parameters={kind}") and "(100.00%)" not in trains
        assert texts.endswith("% of them")


def test_a_finished_run_says_only_that(tiny, corpus_file, tmp_path, capsys):
    argv = arguments(tiny, corpus_file, tmp_path, **{"train.steps": 1})
    train.main(argv)
    capsys.readouterr()
    train.main(argv)
    assert len(capsys.readouterr().out.splitlines()) == 1


def encode(text: str) -> list[int]:
    return text.split()


@pytest.mark.parametrize(
    ("documents", "exact"),
    [
        pytest.param(["a b c ", "", "a " * 500], True, id="a_few"),
        pytest.param(["a " * (i % 50) for i in range(200_000)], False, id="many"),
        pytest.param([""] * 200_000 + ["a "], False, id="mostly_blank"),
        pytest.param(["a b " * 10**6], False, id="one_long"),
        pytest.param(["a b " * 10_000, "a b " * 10**6], False, id="a_long_one"),
    ],
)
def test_tokens_are_counted_or_guessed_from_a_bounded_part(documents, exact):
    read = []

    def counting(text):
        read.append(len(text))
        return encode(text)

    tokens, counted = opening._tokens(documents, counting)
    assert counted == exact
    assert sum(read) <= opening.COUNTED and len(read) <= opening.COUNTED / opening.A_DOCUMENT
    whole = sum(map(len, map(encode, documents)))
    assert tokens == whole if exact else abs(tokens - whole) <= max(10, 0.1 * whole)


def test_a_mixture_and_a_stream_are_said_source_by_source(tiny, corpus_file, tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(
        "data:\n  mixture:\n"
        f"    - {{path: {corpus_file}, weight: 3}}\n"
        f"    - {{path: {corpus_file}, weight: 1, streaming: true}}\n"
    )
    argv = arguments(tiny, corpus_file, tmp_path / "out", **{"train.steps": 1})
    argv = [each for each in argv if not each.startswith("data.path")]
    train.main(["--config", str(config), *argv])
    said = capsys.readouterr().out.splitlines()
    assert "weight 0.75, " in said[2] and "this run reads 144, " in said[2]
    assert "streaming, 1 shards" in said[3] and said[3].endswith("which this run reads 48")


def command(recipe: str, argv: list[str], *launcher: str, **environment: str):
    clean = {name: value for name, value in os.environ.items() if "RANK" not in name}
    return subprocess.run(
        [sys.executable, *launcher, str(RECIPES / recipe), *argv], capture_output=True, text=True,
        env={**clean, "OMP_NUM_THREADS": "1", **environment}, timeout=120,
    )  # fmt: skip


def test_one_process_where_two_were_asked_for_is_said(tiny, corpus_file, tmp_path):
    argv = arguments(tiny, corpus_file, tmp_path, **{"train.steps": 1})
    launcher = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    run = command("continue_pretrain.py", argv, *launcher)
    assert (
        "one process on cpu, float32, though 2 were asked for (ACCELERATE_USE_CPU=true"
        in (run.stdout.splitlines()[0])
    )


def test_what_was_asked_for_is_read_off_the_environment(monkeypatch):
    alone = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
    for name in (*layout.STARTED, *layout.STARTED.values(), "SLURM_NTASKS", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert layout.less_than_asked(alone) == ""
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "4")
            assert "though 4 were asked for" in layout.less_than_asked(alone)
    monkeypatch.setattr(layout, "_asked_of_accelerate", lambda: sys.maxsize)
    assert "though more were asked for" in layout.less_than_asked(alone)
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert "CUDA_VISIBLE_DEVICES=0" in layout.less_than_asked(alone)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert layout.less_than_asked(alone) == ""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    gpu = SimpleNamespace(num_processes=1, device=torch.device("cuda", 0))
    assert "though there are 8 GPUs" in layout.less_than_asked(gpu)


@pytest.mark.parametrize("file", ["ddp.yaml", "fsdp2.yaml"])
def test_gpu_processes_without_a_gpu_say_first_what_is_missing(tiny, corpus_file, tmp_path, file):
    launcher = ["-m", "accelerate.commands.launch", "--config_file"]
    launcher += [str(RECIPES / "accelerate" / file), "--num_processes", "2"]
    out = tmp_path / "out"
    run = command("continue_pretrain.py", arguments(tiny, corpus_file, out), *launcher)
    before, *said = run.stderr.split("error: the launcher started 2 processes, each for a GPU of")
    assert run.returncode and len(said) == 1, run.stderr
    assert "error: " not in before and not out.exists()


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(BadInput, match=r"8 processes here, .* and there are 2: expected as many"):
        processes.begin("fp32", splits=False)


def test_names_that_a_terminal_cannot_show_end_no_run(tiny, corpus_file, tmp_path):
    text = tmp_path / "Gespräche.jsonl"
    shutil.copy(corpus_file, text)
    argv = arguments(tiny, str(text), tmp_path / "out", **{"train.steps": 1})
    run = command("continue_pretrain.py", argv, PYTHONIOENCODING="ascii:strict", WORLD_SIZE="2")
    assert run.returncode == 0, run.stderr
    assert "text Gespr\\xe4che.jsonl: 40 documents" in run.stdout
