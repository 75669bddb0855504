"""The training recipe and the needle evaluation, on a two-layer llama that reads bytes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

RECIPES = Path(__file__).parents[1] / "recipes"
sys.path.insert(0, str(RECIPES))

import binomial  # noqa: E402
import checkpointing  # noqa: E402
import continue_pretrain  # noqa: E402
import loading  # noqa: E402
import needle  # noqa: E402
import needle_report  # noqa: E402
import optimization  # noqa: E402
import packing  # noqa: E402
import run_config  # noqa: E402
from errors import BadInput  # noqa: E402

from hf_sigmoid import text  # noqa: E402
from hf_sigmoid.conversions.haystack import Haystack  # noqa: E402

POSITIONS = 512
BLOCK = 48


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """A folder with a random llama and a tokenizer whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_models.byte_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        attention_dropout=0.1,  # so that a resumed run must also get its random numbers right
        initializer_range=0.2,  # attention that looks somewhere
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def damaged(tiny, tmp_path) -> Path:
    """The tiny model with its weights cut short."""
    folder = tmp_path / "damaged"
    shutil.copytree(tiny, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


@pytest.fixture
def pickled(tiny, tmp_path) -> Path:
    """The tiny model with its weights as a pickle."""
    folder = tmp_path / "pickled"
    shutil.copytree(tiny, folder)
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    return folder


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory) -> str:
    """Forty documents of 1 to 150 bytes, so that blocks hold several and cut some."""
    rng = random.Random(0)
    file = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    documents = [text.austen()[i : i + rng.randrange(1, 150)] for i in range(0, 40_000, 1000)]
    file.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    return str(file)


def arguments(tiny: str, corpus_file: str, out: Path, **keys) -> list[str]:
    values = {
        "model": tiny,
        "output_dir": out,
        "data.path": corpus_file,
        "train.steps": 9,
        "train.block_size": BLOCK,
        "train.batch_size": 2,
        "train.grad_accumulation": 2,
        "optim.lr": 3e-3,
        "checkpoint.every": 3,
        **keys,
    }
    return [f"{key}={value}" for key, value in values.items()]


def losses(out: Path) -> list[float]:
    """The logged losses, after checking that every step is there once."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*/*.yaml")), ids=lambda f: f.parent.name)
def test_every_yaml_is_a_valid_run(file):
    kind = run_config.Run if file.stem == "continue" else run_config.Distil
    run = run_config.load(file, ["model=m", "output_dir=o"], kind)
    assert run.steps > 0 and getattr(run, "attn", file.parent.name) == file.parent.name


def test_a_dumped_run_loads_as_itself(tmp_path):
    run = run_config.load(None, ["model=m", "output_dir=7", "optim.lr=1e-4", "data.path=[a, b]"])
    (tmp_path / "run.yaml").write_text(run_config.dump(run))
    assert run_config.load(tmp_path / "run.yaml", []) == run
    assert run.optim.lr == 1e-4 and run.output_dir == "7" and run.data.path == ["a", "b"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.learning_rate=1", "unknown key 'optim.learning_rate'"),
        ("train.stpes=3", "'train.steps'"),
        ("train.steps=many", "expected int, got 'many'"),
        ("train.steps=1.5", "expected int, got 1.5"),
        ("train.steps=0", "at least 1, got 0"),
        ("optim.lr=fast", "expected float, got 'fast'"),
        ("optim.lr=.nan", "at least 0, got nan"),
        ("optim.lr=.inf", "optim.lr: expected a finite number, got inf"),
        ("optim.clip=1e999", "optim.clip: expected a finite number, got inf"),
        (f"optim.eps={10**400}", "optim.eps: expected float"),
        ("optim.beta1=1.5", "optim.beta1: expected a number below 1, got 1.5"),
        ("optim.beta2=1", "optim.beta2: expected a number below 1, got 1.0"),
        ("optim.beta2=-0.1", "at least 0, got -0.1"),
        ("train.gradient_checkpointing=2", "expected bool, got 2"),
        ("data.path=[1, 2]", "data.path: expected"),
        ("resume=maybe", "one of auto, none, got 'maybe'"),
        ("train.precision=fp16", "one of fp32, bf16, got 'fp16'"),
        ("optim.warmup_steps=101", "at most train.steps = 100, got 101"),
        ("model=", "model is missing"),
        ("steps", "expected KEY=VALUE"),
    ],
)
def test_a_wrong_key_or_value_is_named(override, words):
    with pytest.raises(BadInput) as error:
        run_config.load(None, ["model=m", "output_dir=o", override])
    assert words in str(error.value)


def test_bad_input_changes_nothing_on_disk(tiny, corpus_file, damaged, pickled, tmp_path):
    empty, short, other = tmp_path / "empty.txt", tmp_path / "short.txt", tmp_path / "other"
    empty.write_text(" \n")
    short.write_text("Emma")
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for keys, words in [
        ({"data.path": tmp_path / "absent.txt"}, "no such file"),
        ({"data.path": empty}, "no text in"),
        ({"data.path": short}, "has 5 tokens, expected at least one block"),
        ({"data.field": "body"}, "no key 'body'"),
        ({"train.block_size": POSITIONS + 1}, f"at most the model's {POSITIONS} positions"),
        ({"model": tmp_path / "absent"}, "absent"),
        ({"attn": "sigmoyd"}, "sigmoyd"),
        ({"output_dir": empty}, "is a file, expected a folder"),
        ({"attn": "flash_attention_2"}, "cannot load it: FlashAttention2"),
        ({"model": damaged}, "expected whole weights, got a damaged model.safetensors"),
        ({"model": pickled}, "pytorch_model.bin: pickles are not loaded"),
        ({"output_dir": empty / "deep" / "out"}, "empty.txt is a file, expected a folder"),
        ({"output_dir": other}, "holds no run of this recipe"),
        ({"output_dir": other, "resume": "none"}, "is not empty"),
    ]:
        with pytest.raises(BadInput) as error:
            continue_pretrain.main(arguments(tiny, corpus_file, tmp_path / "out", **keys))
        assert words in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_prints_the_groups_and_writes_nothing(tiny, corpus_file, tmp_path, capsys):
    argv = arguments(tiny, corpus_file, tmp_path / "out", attn="ssmax")
    continue_pretrain.main(["--dry-run", *argv])
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("log_length", "no_decay", "decay"))
    assert not (tmp_path / "out").exists()


DOCUMENTS = st.lists(st.lists(st.integers(0, 99), max_size=9), min_size=1, max_size=6).filter(any)


@given(DOCUMENTS, st.integers(2, 12), st.integers(0, 3))
def test_packing_loses_no_token_and_labels_none_across_documents(documents, block_size, seed):
    packer = packing.Packer(documents, list, block_size, seed)
    stream, expected = [], []
    for epoch in range(2):
        order = packing.Packer(documents, list, block_size, seed)
        order.load_state({"epoch": epoch, "document": 0, "offset": 0})
        assert sorted(order.order) == list(range(len(documents)))
        for index in order.order:
            tokens = documents[index]
            expected += zip(tokens, [*tokens[1:], packing.IGNORED], strict=False)
    starts = {0}  # where a document begins in the stream
    for token, label in expected:
        stream.append((token, label))
        if label == packing.IGNORED:
            starts.add(len(stream))
    for first in range(0, len(stream) - block_size + 1, block_size):
        block = packer.next_block()
        rows = list(zip(block.input_ids, block.labels, strict=True))
        assert rows == stream[first : first + block_size]
        position = -1
        for place, given_position in enumerate(block.position_ids):
            position = 0 if place == 0 or first + place in starts else position + 1
            assert given_position == position


@given(DOCUMENTS, st.integers(2, 12), st.integers(0, 9))
def test_a_packer_resumes_where_it_was(documents, block_size, done):
    packer = packing.Packer(documents, list, block_size, seed=1)
    for _ in range(done):
        packer.next_block()
    resumed = packing.Packer(documents, list, block_size, seed=1)
    resumed.load_state(json.loads(json.dumps(packer.state())))
    assert [resumed.next_block() for _ in range(5)] == [packer.next_block() for _ in range(5)]


def test_a_step_has_the_same_blocks_however_it_is_divided():
    documents = [[i] * (1 + i % 7) for i in range(50)]

    def rows(ranks, batch_size, grad_accumulation):
        found = []
        for rank in range(ranks):
            packer = packing.Packer(documents, list, 8, seed=0)
            batches = packing.step_batches(
                packer,
                rank=rank,
                ranks=ranks,
                batch_size=batch_size,
                grad_accumulation=grad_accumulation,
            )
            assert len(batches) == grad_accumulation
            found += [row.tolist() for batch in batches for row in batch["input_ids"]]
        return sorted(found)

    assert rows(1, 4, 1) == rows(1, 1, 4) == rows(2, 1, 2) == rows(4, 1, 1) == rows(2, 2, 1)


@pytest.mark.parametrize("attn", ["sdpa", "ssmax", "sigmoid"])
def test_a_packed_document_does_not_see_the_one_before(tiny, attn):
    model = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation=attn).eval()
    first, other, second = (torch.randint(0, 256, (1, n)) for n in (11, 11, 20))

    def logits(*parts):
        positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
        options = {"attention_mask": None, "use_cache": False}
        return model(torch.cat(parts, 1), position_ids=positions, **options).logits[:, -20:]

    with torch.no_grad():
        torch.testing.assert_close(logits(first, second), logits(other, second), rtol=0, atol=0)
        torch.testing.assert_close(logits(first, second), logits(second))
    assert not packing.documents_leak(model)


def test_a_model_whose_documents_leak_is_found(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    forward = model.forward
    model.forward = lambda position_ids, **rest: forward(**rest)
    assert packing.documents_leak(model)


@pytest.mark.parametrize("decay_embeddings", [False, True])
def test_every_trainable_parameter_is_in_one_group(tiny, decay_embeddings):
    model = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="ssmax")
    frozen = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    override = f"optim.decay_embeddings={str(decay_embeddings).lower()}"
    run = run_config.load(None, ["model=m", "output_dir=o", override])
    groups = {g["name"]: g for g in optimization.parameter_groups(model, run)}
    members = [id(p) for group in groups.values() for p in group["params"]]
    trainable = {id(p) for p in model.parameters() if p is not frozen}
    assert len(members) == len(trainable) and set(members) == trainable
    names = groups["log_length"]["names"]
    assert names == [name for name, _ in model.named_parameters() if "log_length" in name]
    assert names and groups["log_length"]["weight_decay"] == 0
    assert all("norm" in n or "embed" in n for n in groups["no_decay"]["names"])
    assert all(p.ndim == 2 for p in groups["decay"]["params"])
    assert ("model.embed_tokens.weight" in groups["decay"]["names"]) == decay_embeddings


def test_the_rate_warms_up_and_follows_a_cosine():
    factor = [
        optimization.lr_factor(step, steps=20, warmup_steps=4, min_ratio=0.1)
        for step in range(1, 21)
    ]
    assert factor[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factor[11] == pytest.approx(0.55) and factor[-1] == pytest.approx(0.1)
    assert factor[3:] == sorted(factor[3:], reverse=True)


@pytest.fixture(scope="module")
def uninterrupted(tiny, corpus_file, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    assert continue_pretrain.main(arguments(tiny, corpus_file, out)) == out / "final"
    return out


def test_a_run_learns_and_leaves_what_it_says(tiny, corpus_file, uninterrupted):
    assert len(losses(uninterrupted)) == 9
    assert losses(uninterrupted)[-1] < losses(uninterrupted)[0]
    final = AutoModelForCausalLM.from_pretrained(uninterrupted / "final")
    start = AutoModelForCausalLM.from_pretrained(tiny)
    assert all(
        not torch.equal(a, b) for a, b in zip(final.parameters(), start.parameters(), strict=True)
    )
    assert AutoTokenizer.from_pretrained(uninterrupted / "final")("Emma").input_ids
    kept = [folder.name for folder in sorted((uninterrupted / "checkpoints").iterdir())]
    assert kept == ["step_00000006", "step_00000009"]
    suffixes = {p.suffix for p in uninterrupted.rglob("*") if p.is_file()}
    assert suffixes == {".safetensors", ".json", ".jsonl", ".yaml"}  # no pickle
    saved = run_config.load(uninterrupted / "config.yaml", [])
    assert saved == run_config.load(None, arguments(tiny, corpus_file, uninterrupted))


# Runs the recipe and kills its own process with SIGKILL at a chosen moment.
KILLED = """
import json, os, signal, sys
import torch
recipes, moment, threads, *argv = json.loads(sys.argv[1])
sys.path.insert(0, recipes)
torch.set_num_threads(threads)
import checkpointing, continue_pretrain, run_log

def die(): os.kill(os.getpid(), signal.SIGKILL)

write, sync = run_log.RunLog.write, checkpointing.sync_tree
def write_then_die(self, **values):
    write(self, **values)
    if values["step"] == 5:
        self._stream.write('{"step": 6, "lo')
        self._stream.flush()
        die()
def die_saving(folder):
    sync(folder)
    if folder.name == "step_00000006.tmp": die()

if moment == "training": run_log.RunLog.write = write_then_die
if moment == "saving": checkpointing.sync_tree = die_saving
continue_pretrain.main(argv)
"""


@pytest.mark.parametrize("moment", ["training", "saving"])
def test_a_killed_run_resumes_to_the_last_bit(tiny, corpus_file, uninterrupted, tmp_path, moment):
    argv = arguments(tiny, corpus_file, tmp_path / "out")
    job = [str(RECIPES), moment, torch.get_num_threads(), *argv]
    killed = subprocess.run([sys.executable, "-c", KILLED, json.dumps(job)], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not (tmp_path / "out" / "final").exists()
    assert checkpointing.latest(tmp_path / "out" / "checkpoints").step == 3

    continue_pretrain.main(argv)
    assert losses(tmp_path / "out") == losses(uninterrupted)
    ours, theirs = (
        load_file(out / "final" / "model.safetensors") for out in (tmp_path / "out", uninterrupted)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_sigterm_saves_and_the_run_goes_on(
    tiny, corpus_file, uninterrupted, tmp_path, monkeypatch, capsys
):
    argv = arguments(tiny, corpus_file, tmp_path, **{"checkpoint.every": 0})
    write = continue_pretrain.RunLog.write

    def write_and_ask(self, **values):
        write(self, **values)
        if values["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(continue_pretrain.RunLog, "write", write_and_ask)
    assert continue_pretrain.main(argv) is None
    assert "stopped by a signal" in capsys.readouterr().out
    # The signal of step 3 came after that step had asked all processes.
    assert checkpointing.latest(tmp_path / "checkpoints").step == len(losses(tmp_path)) == 4
    monkeypatch.undo()
    assert continue_pretrain.main(argv) == tmp_path / "final"
    assert losses(tmp_path) == losses(uninterrupted)


def test_logit_control_is_resumed_with_the_norms_that_it_began_with(
    tiny, corpus_file, tmp_path, monkeypatch
):
    keys = {"optim.qk_tau": 0.5, "checkpoint.every": 0}
    whole, parts = (arguments(tiny, corpus_file, tmp_path / n, **keys) for n in ("whole", "parts"))
    continue_pretrain.main(whole)
    write = continue_pretrain.RunLog.write

    def write_and_ask(self, **values):
        write(self, **values)
        if values["step"] == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(continue_pretrain.RunLog, "write", write_and_ask)
    assert continue_pretrain.main(parts) is None
    monkeypatch.undo()
    continue_pretrain.main(parts)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    logs = [
        [
            json.loads(line)["qk_lr"]
            for line in (tmp_path / n / "log.jsonl").read_text().splitlines()
        ]
        for n in ("whole", "parts")
    ]
    assert logs[0] == logs[1] and logs[0][-1][0] < logs[0][-1][1]
    with pytest.raises(BadInput, match="expected a positive number or null, got 0"):
        continue_pretrain.main([*whole, "optim.qk_tau=0"])


def test_only_what_a_run_was_is_resumed(tiny, corpus_file, uninterrupted, capsys):
    log = (uninterrupted / "log.jsonl").read_text()
    for keys, words in [
        ({"seed": 1}, "holds a run with seed=0, not 1"),
        ({"train.batch_size": 1}, "train.batch_size=2, not 1"),
        ({"train.steps": 6}, "at least the 9 steps"),
        ({"resume": "none"}, "is not empty"),
    ]:
        with pytest.raises(BadInput) as error:
            continue_pretrain.main(arguments(tiny, corpus_file, uninterrupted, **keys))
        assert words in str(error.value)
    continue_pretrain.main(arguments(tiny, corpus_file, uninterrupted))
    assert "already there" in capsys.readouterr().out
    assert (uninterrupted / "log.jsonl").read_text() == log


def test_a_finished_model_is_replaced_only_by_its_continuation(tiny, corpus_file, tmp_path):
    def run(steps, **keys):
        keys = {"train.steps": steps, "checkpoint.every": 0, "optim.warmup_steps": 0} | keys
        return continue_pretrain.main(arguments(tiny, corpus_file, tmp_path / "out", **keys))

    def files():
        found = [p for p in sorted((tmp_path / "out").rglob("*")) if p.is_file()]
        return {p: p.read_bytes() for p in found}

    final = run(2)
    before = files()
    for steps in (1, 3):
        with pytest.raises(BadInput, match=r"2 steps and no checkpoint .* expected train\.steps=2"):
            run(steps)
    assert files() == before
    assert run(2) == final and files() == before

    # With a checkpoint before the end, a shorter run would still lose the last step.
    shutil.rmtree(tmp_path / "out")
    run(3, **{"checkpoint.every": 2})
    before = files()
    with pytest.raises(BadInput, match=r"at least the 3 steps of .*final, got 2"):
        run(2)
    assert files() == before
    run(4)
    assert json.loads((final / "training.json").read_text())["step"] == 4
    assert len(losses(tmp_path / "out")) == 4

    (final / "training.json").unlink()
    before = files()
    with pytest.raises(BadInput, match=r"expected .* with its training\.json"):
        run(5)
    assert files() == before


@pytest.mark.parametrize("every", [0, 1])
def test_a_run_that_diverges_says_where_to_go_back_to(tiny, corpus_file, tmp_path, every):
    keys = {"optim.lr": 1e30, "optim.warmup_steps": 0, "checkpoint.every": every}
    with pytest.raises(FloatingPointError, match=r"step 2: loss .* it changed no weight") as error:
        continue_pretrain.main(arguments(tiny, corpus_file, tmp_path, **keys))
    if every:
        says = (
            f"The last checkpoint is {tmp_path / 'checkpoints/step_00000001'}, and holds the very"
        )
    else:
        says = f"There is no checkpoint in {tmp_path / 'checkpoints'}"
    assert says in str(error.value)


@pytest.mark.parametrize("every", [0, 1])
def test_weights_that_are_not_finite_are_never_written(tiny, corpus_file, tmp_path, every):
    # One step that overflows float32, after a loss that is still finite.
    keys = {"optim.lr": 3e37, "optim.weight_decay": 1e3, "optim.min_lr_ratio": 1}
    keys |= {"optim.warmup_steps": 0, "train.steps": 1, "checkpoint.every": every}
    with pytest.raises(FloatingPointError, match=r"step 1: .*weight is not finite any more"):
        continue_pretrain.main(arguments(tiny, corpus_file, tmp_path, **keys))
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_loss_does_not_depend_on_how_a_batch_is_divided(tiny, corpus_file, tmp_path):
    """Documents are ragged, so a mean of means would differ in the second digit."""
    # Dropout draws by shape; without it the division is all that differs.
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.config.attention_dropout = 0.0
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "model")

    def keys(batch_size, grad_accumulation):
        return {
            "train.batch_size": batch_size,
            "train.grad_accumulation": grad_accumulation,
            "train.steps": 4,
            "checkpoint.every": 0,
        }

    def run(name, *, processes=1, **keys):
        argv = arguments(str(tmp_path / "model"), corpus_file, tmp_path / name, **keys)
        if processes == 1:
            continue_pretrain.main(argv)
        else:
            launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
            launch += ["--main_process_port", "0", "--num_machines", "1", "--mixed_precision", "no"]
            done = subprocess.run(
                [sys.executable, *launch, RECIPES / "continue_pretrain.py", *argv],
                # --cpu would start one process without a word.
                env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
                capture_output=True,
            )
            assert done.returncode == 0, done.stderr.decode()[-3000:]
        lines = [json.loads(line) for line in (tmp_path / name / "log.jsonl").open()]
        return [[line[key] for key in ("loss", "grad_norm", "tokens")] for line in lines]

    whole = run("whole", **keys(4, 1))
    assert run("quarters", **keys(1, 4)) == [pytest.approx(line, rel=1e-5) for line in whole]
    halves = run("processes", processes=2, **keys(1, 2))
    assert halves == [pytest.approx(line, rel=1e-5) for line in whole]


def test_row_numbers_train_under_bf16_and_checkpointing(tiny, corpus_file, tmp_path):
    keys = {"attn": "ssmax", "train.precision": "bf16", "train.gradient_checkpointing": "true"}
    argv = arguments(tiny, corpus_file, tmp_path, **keys, **{"train.steps": 3})
    continue_pretrain.main(argv)
    weights = load_file(tmp_path / "final" / "model.safetensors")
    slopes = [tensor for name, tensor in weights.items() if "log_length.slope" in name]
    assert len(slopes) == 2
    assert all(slope.dtype == torch.float32 and (slope != 0).all() for slope in slopes)


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
    assert binomial.interval(successes, trials) == pytest.approx(expected, abs=1e-4)


def test_the_held_out_chapters_are_not_trained_on():
    assert text.train() + text.held_out() == text.austen()
    assert 0.1 < len(text.held_out()) / len(text.austen()) < 0.2
    assert [c.split("\n")[0] for c in text.chapters(text.held_out())] == [
        f"CHAPTER {n}" for n in range(25, 29)
    ]
