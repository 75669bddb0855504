"""continue_pretrain.py on a two-layer llama that reads bytes."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import releases
import torch
from safetensors.torch import load_file, save_file
from training_runs import (
    BLOCK,
    POSITIONS,
    arguments,
    in_two_parts,
    killed,
    lines,
    losses,
    measured,
    refused,
    same_weights,
    signal_after,
    tensors,
    work,
)  # fmt: skip
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

import hf_sigmoid

from hf_sigmoid.training import checkpointing  # isort: skip
from hf_sigmoid.training import train  # isort: skip
from hf_sigmoid.training import held_out  # isort: skip
from hf_sigmoid.training import optimization  # isort: skip
from hf_sigmoid.training import packing  # isort: skip
from hf_sigmoid.training import run_config  # isort: skip
from hf_sigmoid.training import run_log  # isort: skip
from hf_sigmoid.training import update  # isort: skip
from hf_sigmoid.errors import BadInput  # isort: skip


def test_bad_input_changes_nothing_on_disk(tiny, corpus_file, damaged, pickled, tmp_path):
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_text(" \n")
    short.write_text("Emma")
    for name in ("thesis.txt", ".env", "draft.tmp", "config.yaml"):
        (tmp_path / name[1:] / name).parent.mkdir()
        (tmp_path / name[1:] / name).write_text("mine")
    other = tmp_path / "hesis.txt"
    ssmax = shutil.copytree(tiny, tmp_path / "ssmax")
    model = AutoModelForCausalLM.from_pretrained(tiny)
    hf_sigmoid.configure(model, "ssmax")
    model.save_pretrained(ssmax)
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
        ({"model": ssmax, "attn": "sigmoid"}, "converted to ssmax, got sigmoid; leave attn out"),
        ({"model": ssmax, "attn": "sdpa"}, "was converted to ssmax, got sdpa"),
        ({"attn": "flash_attention_2"}, f"with attn flash_attention_2: {releases.NO_FLASH}"),
        ({"model": damaged}, "expected whole weights, got a damaged model.safetensors"),
        ({"model": pickled}, "pytorch_model.bin: pickles are not loaded"),
        ({"output_dir": empty / "deep" / "out"}, "empty.txt is a file, expected a folder"),
        ({"output_dir": "/proc/runs/out"}, "/proc cannot be written"),
        ({"output_dir": other}, "holds no run of this recipe"),
        ({"output_dir": tmp_path / "env"}, "holds no run of this recipe"),
        ({"output_dir": tmp_path / "raft.tmp"}, "holds no run of this recipe"),
        ({"output_dir": tmp_path / "onfig.yaml"}, "config.yaml is not of a run of this recipe"),
        ({"output_dir": other, "resume": "none"}, "is not empty"),
        ({"optim.qk_clip": 9}, "optim.qk_clip: expected attn sigmoid or ssmax, got sdpa"),
        ({"optim.qk_tau": 0}, "optim.qk_tau: expected a positive number or null, got 0"),
    ]:
        refused(train.main, arguments(tiny, corpus_file, tmp_path / "out", **keys), words)
    assert sorted(tmp_path.rglob("*")) == before


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
    assert train.main(arguments(tiny, corpus_file, out)) == out / "final"
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
    suffixes = {p.suffix for p in uninterrupted.rglob("[!.]*") if p.is_file()}
    assert suffixes == {".safetensors", ".json", ".jsonl", ".yaml", ".md"}  # no pickle
    saved = run_config.load(uninterrupted / "config.yaml", [])
    assert saved == run_config.load(None, arguments(tiny, corpus_file, uninterrupted))


# Runs the recipe and kills its own process with SIGKILL at a chosen moment.
KILLED = """
import json, os, signal, sys
import torch
moment, threads, *argv = json.loads(sys.argv[1])
torch.set_num_threads(threads)
from hf_sigmoid import files
from hf_sigmoid.training import checkpointing, run_log, train

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

def write_then_fill(self, **values):
    write(self, **values)
    if values["step"] == 5:
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, -1))  # no file grows beyond
def die_renaming(one, other):
    if str(one).endswith("step_00000006.tmp"): die()
    replace(one, other)
replace = os.replace
if moment == "renaming": files.os.replace = die_renaming
if moment == "full": run_log.RunLog.write = write_then_fill
if moment == "training": run_log.RunLog.write = write_then_die
if moment == "saving": checkpointing.sync_tree = die_saving
from hf_sigmoid.training import script
script.run(lambda: train.main(argv))
"""


def test_a_run_killed_while_it_writes_its_first_file_begins_anew(tiny, corpus_file, tmp_path):
    die = "lambda new: (new.write_text('model: '), os.kill(os.getpid(), signal.SIGKILL))"
    killed(
        "import json, os, signal, sys; from pathlib import Path\n"
        "from hf_sigmoid.files import write_file\n"
        f"write_file(Path(json.loads(sys.argv[1])[0], 'config.yaml'), {die})",
        str(tmp_path),
    )
    (tmp_path / ".lock").touch()
    assert len(list(tmp_path.iterdir())) == 2
    assert train.main(arguments(tiny, corpus_file, tmp_path, **{"train.steps": 1}))


@pytest.mark.parametrize("moment", ["training", "saving"])
def test_a_killed_run_resumes_to_the_last_bit(tiny, corpus_file, uninterrupted, tmp_path, moment):
    argv, out = arguments(tiny, corpus_file, tmp_path / "out"), tmp_path / "out"
    killed(KILLED, moment, torch.get_num_threads(), *argv)
    assert not (out / "final").exists()
    assert checkpointing.latest(out / "checkpoints").step == 3
    train.main(argv)
    assert losses(out) == losses(uninterrupted)
    assert same_weights(out / "final", uninterrupted / "final")
    assert not list(out.rglob("*.tmp"))


@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1], [signal.SIGINT]],
    ids=["once", "more_than_once", "ctrl-c"],
)
def test_a_signal_saves_and_the_run_goes_on(
    tiny, corpus_file, uninterrupted, tmp_path, monkeypatch, capsys, numbers
):
    argv = arguments(tiny, corpus_file, tmp_path, **{"checkpoint.every": 0})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    signal_after(monkeypatch, 3, *numbers)
    if signal.SIGINT in numbers:
        with pytest.raises(KeyboardInterrupt, match="step 4 is saved: the same command goes on"):
            train.main(argv)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    else:
        assert train.main(argv) is None
        assert "stopped by a signal" in capsys.readouterr().out
    signal.signal(signal.SIGINT, before)
    # The signal of step 3 came after that step had asked all processes.
    assert checkpointing.latest(tmp_path / "checkpoints").step == len(losses(tmp_path)) == 4
    monkeypatch.undo()
    assert train.main(argv) == tmp_path / "final"
    assert losses(tmp_path) == losses(uninterrupted)


def test_only_what_a_run_was_is_resumed(tiny, corpus_file, uninterrupted, capsys):
    log = (uninterrupted / "log.jsonl").read_text()
    for keys, words in [
        ({"seed": 1}, "holds a run with seed=0, not 1"),
        ({"train.block_size": 32}, "train.block_size=48, not 32"),
        ({"train.batch_size": 1}, "took 4 blocks a step"),
        ({"train.steps": 6}, "at least the 9 steps"),
        ({"resume": "none"}, "is not empty"),
    ]:
        refused(train.main, arguments(tiny, corpus_file, uninterrupted, **keys), words)
    train.main(arguments(tiny, corpus_file, uninterrupted))
    assert "already there" in capsys.readouterr().out
    assert (uninterrupted / "log.jsonl").read_text() == log


def test_a_finished_model_is_replaced_only_by_its_continuation(tiny, corpus_file, tmp_path):
    def run(steps, **keys):
        keys = {"train.steps": steps, "checkpoint.every": 0, "optim.warmup_steps": 0} | keys
        return train.main(arguments(tiny, corpus_file, tmp_path / "out", **keys))

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
    match = r"step 4: loss .* the 3\. step in a row .* it changed no weight"
    with pytest.raises(FloatingPointError, match=match) as error:
        train.main(arguments(tiny, corpus_file, tmp_path, **keys))
    if every:
        says = (
            f"The last checkpoint is {tmp_path / 'checkpoints/step_00000003'}, and holds the very"
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
        train.main(arguments(tiny, corpus_file, tmp_path, **keys))
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.fixture(scope="module")
def without_dropout(tiny, tmp_path_factory) -> str:
    """Dropout draws by shape; without it the division of a batch is all that differs."""
    folder = tmp_path_factory.mktemp("without_dropout")
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.config.attention_dropout = 0.0
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return str(folder)


def test_the_loss_does_not_depend_on_how_a_batch_is_divided(without_dropout, corpus_file, tmp_path):
    """Documents are ragged, so a mean of means would differ in the second digit."""

    def job(world, accumulation):
        keys = {"train.batch_size": 8 // (world * accumulation), "data.streams": 2}
        keys |= {"train.grad_accumulation": accumulation, "train.steps": 3, "checkpoint.every": 0}
        return arguments(without_dropout, corpus_file, tmp_path / f"{world}x{accumulation}", **keys)

    for accumulation in (1, 2, 4):
        train.main(job(1, accumulation))
    work([({}, job(2, accumulation), 0) for accumulation in (1, 2, 4)], processes=2)
    rows = {
        out.name: [[line[k] for k in ("loss", "grad_norm", "tokens")] for line in lines(out)]
        for out in tmp_path.iterdir()
    }
    assert rows.keys() == {"1x1", "1x2", "1x4", "2x1", "2x2", "2x4"}
    for divided in rows.values():
        assert divided == [pytest.approx(line, rel=1e-5) for line in rows["1x1"]]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    tiny, corpus_file, uninterrupted, tmp_path, capfd
):
    out = tmp_path / "out"
    shutil.copytree(uninterrupted, out)
    shutil.rmtree(out / "final")
    weights = out / "checkpoints" / "step_00000009" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # of the same size: only the hash can tell
    weights.write_bytes(content)
    train.main(arguments(tiny, corpus_file, out))
    warned = capfd.readouterr()
    assert "step_00000009 is damaged: model/model.safetensors has changed" in warned.err
    assert "resuming after step 6" in warned.out
    assert losses(out) == losses(uninterrupted)
    names = sorted(p.name for p in (out / "checkpoints").iterdir())
    assert names == ["damaged_step_00000009", "step_00000006", "step_00000009"]

    shutil.rmtree(out / "final")
    for folder in (out / "checkpoints").glob("step_*"):
        (folder / "optimizer.safetensors").unlink()
    refused(train.main, arguments(tiny, corpus_file, out), "all of 2 checkpoints are damaged")
    assert "optimizer.safetensors is missing" in capfd.readouterr().err


WATCHED = {
    "evaluate.path": "builtin", "evaluate.every": 3, "evaluate.windows": 3,
    "evaluate.needle": "[250]", "evaluate.health_every": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def watched(tiny, corpus_file, tmp_path_factory) -> Path:
    """A run of ssmax that is evaluated, with its plots."""
    out = tmp_path_factory.mktemp("watched") / "out"
    train.main(["--plot", *arguments(tiny, corpus_file, out, attn="ssmax", **WATCHED)])
    return out


def test_a_run_is_watched(watched):
    log = lines(watched)
    assert set(log[0]["before"]) == {"held_out", "needle"}
    for line in log:
        assert ("held_out" in line) == ("health" in line) == (line["step"] % 3 == 0)
        assert line["tok_s"] > 0 and line["tflop_s"] > 0 and line["memory_gb"] > 0.1
        assert line["mfu"] is None  # of a CPU
    assert log[-1]["held_out"]["builtin"] < log[0]["before"]["held_out"]["builtin"]
    health = log[-1]["health"]
    for name in ("max_logit", "mean_change", "row_sum", "saturated", "offset", "slope"):
        assert len(health[name]) == 2, name  # layers
    assert health["row_sum"] == pytest.approx([1, 1], rel=1e-3)
    assert log[2]["health"]["mean_change"] == [None, None] and min(health["mean_change"]) > 0


def test_the_held_out_loss_is_the_models(watched):
    """The same windows by transformers' own loss."""
    from hf_sigmoid import text
    from hf_sigmoid.conversions.compare import token_windows

    model = AutoModelForCausalLM.from_pretrained(watched / "final")
    tokenizer = AutoTokenizer.from_pretrained(watched / "final")
    windows = token_windows(tokenizer, text.held_out(), BLOCK, 3)
    with torch.no_grad():
        expected = model(input_ids=windows, labels=windows).loss.item()
    assert lines(watched)[-1]["held_out"]["builtin"] == pytest.approx(expected, rel=1e-5)


def test_a_run_leaves_pictures_and_a_card(watched):
    from huggingface_hub import metadata_load
    from PIL import Image

    for name in ("training.png", "attention.png"):
        with Image.open(watched / "plots" / name) as picture:
            assert picture.width > 500 and len(picture.getcolors(1 << 20)) > 10
    card = (watched / "final" / "README.md").read_text()
    assert "hf-sigmoid" in metadata_load(watched / "final" / "README.md")["tags"]
    after = lines(watched)[-1]["held_out"]["builtin"]
    assert f"{after:.3f}" in card and "import hf_sigmoid" in card
    assert str(watched.parent) not in card


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_evaluation_saves_and_the_evaluation_is_made_up_for(
    tiny, corpus_file, watched, tmp_path, monkeypatch, number
):
    argv = arguments(tiny, corpus_file, tmp_path / "out", attn="ssmax", **WATCHED)
    score, calls = held_out._loss, []

    def score_and_ask(*given):
        calls.append(1)
        if len(calls) == 3 * 2 + 2:  # before training, after step 3, and now in step 6's second
            os.kill(os.getpid(), number)
        return score(*given)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(held_out, "_loss", score_and_ask)
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt, match="evaluation of step 6, which is saved"):
            train.main(argv)
    else:
        assert train.main(argv) is None
    signal.signal(signal.SIGINT, before)
    assert len(calls) == 8  # it did not measure to the end
    monkeypatch.undo()
    assert checkpointing.latest(tmp_path / "out" / "checkpoints").step == 6
    assert len(losses(tmp_path / "out")) == 5
    train.main(argv)
    assert measured(tmp_path / "out") == measured(watched)


def not_finite_in(monkeypatch, *calls: int, gradient: bool = False) -> None:
    """Some of a run's losses become NaN, or their gradients alone."""
    loss, number = update._summed_cross_entropy, iter(range(1, 10**6))

    def broken(*given):
        value = loss(*given)
        if next(number) not in calls:
            return value
        # A finite value with a gradient that is not.
        bad = (value - value.detach()).clamp(min=0).sqrt()
        return value + bad if gradient else value * float("nan")

    monkeypatch.setattr(update, "_summed_cross_entropy", broken)


@pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(
    tiny, corpus_file, tmp_path, monkeypatch, gradient
):
    # Two micro-batches a step: the second of step 3, the first of step 5.
    not_finite_in(monkeypatch, 6, 9, gradient=gradient)
    keys = {"checkpoint.every": 1, "checkpoint.keep": 9, "train.steps": 6}
    train.main(arguments(tiny, corpus_file, tmp_path, **keys))
    log = lines(tmp_path)
    assert [line["grad_norm"] is None for line in log] == [s in (3, 5) for s in range(1, 7)]
    assert [line["skipped"] for line in log] == [0, 0, 1, 1, 2, 2]
    for file in ("model/model.safetensors", "optimizer.safetensors"):
        kept = [load_file(tmp_path / f"checkpoints/step_0000000{s}" / file) for s in range(1, 7)]
        same = [all(torch.equal(a[n], b[n]) for n in a) for a, b in itertools.pairwise(kept)]
        assert same == [False, True, False, True, False]
    # Which text it was: a packer at that place gives the step's blocks again.
    manifest = json.loads((tmp_path / "checkpoints/step_00000002/manifest.json").read_text())
    assert log[2]["batch"] == manifest["packer"]
    assert json.loads((tmp_path / "final" / "training.json").read_text())["skipped"] == 2


def test_skipped_steps_are_counted_over_a_resume(tiny, corpus_file, tmp_path, monkeypatch):
    keys = {"checkpoint.every": 3, "train.max_skipped": 2, "train.steps": 6}
    not_finite_in(monkeypatch, 5)
    argv = arguments(tiny, corpus_file, tmp_path, **keys)
    signal_after(monkeypatch, 2, signal.SIGTERM)
    assert train.main(argv) is None
    monkeypatch.undo()
    not_finite_in(monkeypatch, 1)
    with pytest.raises(FloatingPointError, match=r"step 4: .* the 2\. step in a row"):
        train.main(argv)


@pytest.mark.parametrize(
    "keys",
    [
        {"lora.rank": 4},
        {"lora.rank": 2, "lora.targets": "all-linear"},
        {"optim.optimizer": "muon", "optim.qk_tau": 1.0},
        {"train.parameters": "log_length"},
        {"train.parameters": "attention", "optim.qk_lr_scale": 0.5, "optim.schedule": "linear"},
        {"optim.qk_clip": 0.5},
        {"train.precision": "bf16", "train.gradient_checkpointing": "true"},
    ],
    ids=lambda keys: "-".join(f"{k.split('.')[1]}={v}" for k, v in keys.items()),
)
def test_every_way_to_train_resumes_to_the_last_bit(tiny, corpus_file, tmp_path, keys, monkeypatch):
    keys = {"attn": "ssmax", "train.steps": 6, "checkpoint.every": 0, **keys}
    whole, parts = (tmp_path / name for name in ("whole", "parts"))
    final = train.main(arguments(tiny, corpus_file, whole, **keys))
    in_two_parts(monkeypatch, train.main, arguments(tiny, corpus_file, parts, **keys), 2)
    assert measured(parts) == measured(whole)
    assert same_weights(parts / "final", final)
    assert all(t.dtype == torch.float32 for n, t in tensors(final).items() if "log_length" in n)
    if "optim.qk_tau" in keys:  # rates of their own, by the norms that the run began with
        assert measured(whole)[-1]["qk_lr"][0] < measured(whole)[-1]["qk_lr"][1]
    start = dict(
        AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="ssmax").named_parameters()
    )
    end = dict(AutoModelForCausalLM.from_pretrained(final).named_parameters())
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    numbers = {name for name in start if "log_length" in name}
    attention = {name for name in start if "self_attn" in name}
    projections = {name for name in start if name.endswith("_proj.weight")}
    adapted = projections if "lora.targets" in keys else projections & attention
    expected = {
        "lora": adapted | numbers,
        "log_length": numbers, "attention": attention,
    }.get("lora" if "lora.rank" in keys else keys.get("train.parameters"), set(start))  # fmt: skip
    assert changed == expected


def test_adapters_are_saved_with_the_row_numbers_and_know_their_conversion(
    tiny, corpus_file, tmp_path
):
    from peft import PeftModel

    keys = {"attn": "ssmax", "lora.rank": 4, "train.steps": 4, "optim.log_length_lr": 0.1}
    final = train.main(arguments(tiny, corpus_file, tmp_path, **keys))
    checkpoint = tmp_path / "checkpoints" / "step_00000003" / "model"
    assert not (checkpoint / "model.safetensors").exists()
    saved = load_file(final / "adapter" / "adapter_model.safetensors")
    assert sum("log_length" in name for name in saved) == 4
    assert all(t.dtype == torch.float32 for n, t in saved.items() if "log_length" in n)
    base = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="ssmax")
    adapted = PeftModel.from_pretrained(base, final / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(final).eval()
    ids = torch.arange(60)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(hf_sigmoid.Unsupported):
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), final / "adapter")
    for file in final.rglob("*"):  # no place on this machine is named
        if file.suffix in (".json", ".md"):
            said = file.read_text()
            assert str(Path(tiny).parent) not in said and str(tmp_path) not in said, file


def test_a_disk_that_fills_up_ends_the_run_and_leaves_the_last_checkpoint(
    tiny, corpus_file, uninterrupted, tmp_path
):
    argv = arguments(tiny, corpus_file, tmp_path / "out")
    job = ["full", torch.get_num_threads(), *argv]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(job)], capture_output=True, text=True
    )
    assert ended.returncode == 2, ended.stderr
    (said,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "step_00000006 could not be written" in said and "Traceback" not in ended.stderr
    names = [p.name for p in (tmp_path / "out" / "checkpoints").iterdir()]
    assert names == ["step_00000003"]
    train.main(argv)
    assert losses(tmp_path / "out") == losses(uninterrupted)


def test_a_disk_without_room_is_refused_before_the_model_loads(
    tiny, corpus_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 10**5))
    with pytest.raises(BadInput, match=r"output_dir .* needs 0\.00 GB, there are 0\.00 GB"):
        train.main(arguments(tiny, corpus_file, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_epoch_is_as_many_steps_as_its_tokens_fill(tiny, corpus_file, tmp_path):
    keys = {"train.steps": "null", "train.epochs": 0.5, "checkpoint.every": 0}
    train.main(arguments(tiny, corpus_file, tmp_path, **keys))
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    rows = [json.loads(line)["text"] for line in Path(corpus_file).read_text().splitlines()]
    tokens = sum(len(tokenizer(text).input_ids) + 1 for text in rows)
    steps = -(-tokens // (2 * 4 * BLOCK))
    assert len(losses(tmp_path)) == steps
    train.main(arguments(tiny, corpus_file, tmp_path, **keys))  # already there
    with pytest.raises(BadInput, match=f"at most the {steps} steps"):
        train.main(
            arguments(tiny, corpus_file, tmp_path / "b", **keys, **{"optim.warmup_steps": 99})
        )


def test_a_fused_projection_has_no_rate_of_its_own(tmp_path, corpus_file):
    import tiny_models

    tiny_models.byte_tokenizer().save_pretrained(tmp_path / "model")
    tiny_models.build("gpt2").save_pretrained(tmp_path / "model")
    keys = {"optim.qk_lr_scale": 0.5, "train.block_size": 12}
    with pytest.raises(BadInput, match=r"optim\.qk_lr_scale: .*c_attn"):
        train.main(arguments(str(tmp_path / "model"), corpus_file, tmp_path / "out", **keys))


def test_values_reach_tensorboard_once_each_over_a_resume(tiny, corpus_file, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    keys = {"log.trackers": "[tensorboard]", "train.steps": 5, **WATCHED, "checkpoint.every": 2}
    argv = arguments(tiny, corpus_file, tmp_path / "out", attn="ssmax", **keys)
    write = run_log.RunLog.write

    def write_and_fail(self, **values):
        write(self, **values)
        if values["step"] == 4:
            raise KeyboardInterrupt  # after it was logged here, before there is a checkpoint

    monkeypatch.setattr(run_log.RunLog, "write", write_and_fail)
    with pytest.raises(KeyboardInterrupt):
        train.main(argv)
    monkeypatch.undo()
    train.main(argv)
    events = EventAccumulator(str(tmp_path / "out" / "hf-sigmoid"))
    events.Reload()
    logged = [(event.step, event.value) for event in events.Scalars("loss")]
    assert [step for step, _ in logged] == [1, 2, 3, 4, 5]
    assert [value for _, value in logged] == pytest.approx(losses(tmp_path / "out"))
    assert "health/max_logit/max" in events.Tags()["scalars"]


def test_a_tracker_that_is_not_installed_is_named(tiny, corpus_file, tmp_path, monkeypatch):
    from hf_sigmoid.training import trackers

    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    refused(
        train.main,
        arguments(tiny, corpus_file, tmp_path / "out", **{"log.trackers": "[wandb]"}),
        "wandb is not installed",
    )


@pytest.mark.parametrize("keys", [{}, {"lora.rank": 2}, {"optim.optimizer": "muon"}], ids=str)
def test_a_dry_run_says_what_would_be_done(tiny, corpus_file, tmp_path, capsys, keys):
    argv = arguments(tiny, corpus_file, tmp_path / "out", attn="ssmax", **keys)
    train.main(["--dry-run", *argv])
    printed = capsys.readouterr().out
    for words in (
        "LlamaForCausalLM, attention ssmax, one process", "40 documents", "log_length",
        "parameters train", "192 tokens a step, 1,728 in all", "rate: ", "memory of a process",
        "one step of 2 layers with random weights: loss ",
    ):  # fmt: skip
        assert words in printed, words
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_killed_at_random_moments_is_the_run_that_was_not(monkeypatch):
    """Three moments here; `python tests/kills.py --kills 50` takes fifty."""
    import kills

    counts = kills.main(["--kills", "3", "--seed", "1"])
    assert counts["kills"] == 3


def test_a_checkpoint_that_is_replaced_is_there_at_every_moment(
    tiny, corpus_file, uninterrupted, tmp_path
):
    """One whose evaluation was to come is written again: killed then, the first one is left."""
    out = tmp_path / "out"
    argv = arguments(tiny, corpus_file, out)
    shutil.copytree(uninterrupted, out)
    shutil.rmtree(out / "final")
    shutil.rmtree(out / "checkpoints" / "step_00000009")
    later = out / "checkpoints" / "step_00000006"
    earlier = json.loads((later / "manifest.json").read_text())
    with (out / "log.jsonl").open() as log:
        logged = [json.loads(line) for line in log]
    earlier["pending"] = {k: v for k, v in logged[5].items() if k != "step"}
    (later / "manifest.json").write_text(json.dumps(earlier))
    keep = {**dict(item.split("=", 1) for item in argv), "evaluate.path": "builtin",
            "evaluate.every": "6", "evaluate.windows": "1"}  # fmt: skip
    config = run_config.load(None, [f"{key}={value}" for key, value in keep.items()])
    (out / "config.yaml").write_text(run_config.dump(config))
    argv = [f"{key}={value}" for key, value in keep.items()]
    killed(KILLED, "renaming", torch.get_num_threads(), *argv)
    names = sorted(p.name for p in (out / "checkpoints").iterdir())
    assert names == ["replaced_step_00000006", "step_00000006.tmp"]
    train.main(argv)
    assert losses(out) == losses(uninterrupted)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [
        "step_00000006", "step_00000009"
    ]  # fmt: skip


def test_two_runs_do_not_write_into_one_folder(tiny, corpus_file, tmp_path):
    from hf_sigmoid.run_lock import RunLock

    lock = RunLock(tmp_path)
    refused(
        train.main, arguments(tiny, corpus_file, tmp_path), "another process is writing into it"
    )
    lock.release()
    train.main(arguments(tiny, corpus_file, tmp_path, **{"train.steps": 1}))


def test_a_held_out_loss_that_is_not_a_number_is_null(tiny, corpus_file, tmp_path, monkeypatch):
    values = iter([(9e9, 1.0), (float("nan"), 1.0), (float("inf"), 1.0)])
    monkeypatch.setattr(held_out, "_loss", lambda *given: next(values))
    keys = {"evaluate.path": "builtin", "evaluate.every": 1, "evaluate.windows": 1}
    train.main(arguments(tiny, corpus_file, tmp_path, **keys, **{"train.steps": 2}))
    text = (tmp_path / "log.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert [line["held_out"]["builtin"] for line in lines(tmp_path)] == [None, None]


def test_a_run_goes_on_only_from_what_it_began_with(tiny, corpus_file, tmp_path):
    """Adapters hold no base, and no checkpoint holds the tokenizer that packs the text."""
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny, model)
    keys = {"attn": "ssmax", "lora.rank": 2, "train.steps": 3}
    argv = arguments(str(model), corpus_file, out, **keys)
    train.main(argv)
    more = [*argv, "train.steps=4"]
    (out / "log.jsonl").rename(out / "log.kept")
    refused(train.main, more, "log.jsonl: expected a line of each step from 1 to 3")
    (out / "log.kept").rename(out / "log.jsonl")

    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    refused(train.main, more, "its weights has changed since")
    shutil.copy(Path(tiny) / "model.safetensors", model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(train.main, more, "its tokenizer has changed since")


@pytest.fixture(scope="module")
def experts(tiny, tmp_path_factory) -> str:
    """A small mixture-of-experts model."""
    folder = tmp_path_factory.mktemp("experts")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.save_pretrained(folder)
    config = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=1,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_a_mixture_of_experts_trains_under_control(experts, corpus_file, tmp_path):
    keys = {"attn": "ssmax", "optim.qk_tau": 1, "optim.qk_clip": 5, "train.steps": 3}
    train.main(["--dry-run", *arguments(experts, corpus_file, tmp_path, **keys)])
    train.main(arguments(experts, corpus_file, tmp_path, **keys))
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


def test_operations_are_those_that_are_done(tiny, experts):
    """By hand: every weight that multiplies, six a token; packed rows see their document only."""
    from hf_sigmoid.training.speed import Speed

    model = AutoModelForCausalLM.from_pretrained(tiny)
    speed = Speed(model, torch.device("cpu"), "fp32")
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48
    assert speed.weights == 6 * (2 * layer + 257 * 32)
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    assert speed.keys(positions) == 2 * ((1 + 2 + 3 + 1 + 2) + 15)
    rates = speed.measure(tokens=10, keys=48, seconds=2.0, processes=2)
    expected = (speed.weights * 10 + 12 * 4 * 8 * 48) / 2 / 1e12
    assert rates["tflop_s"] == pytest.approx(expected, rel=1e-4)
    assert rates["tok_s"] == 5 and rates["tok_s_process"] == 2.5

    model = AutoModelForCausalLM.from_pretrained(experts)
    one = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 32 * 4  # one expert of four, and the router
    assert Speed(model, torch.device("cpu"), "fp32").weights == 6 * (2 * one + 257 * 32)

    model.config.layer_types, model.config.sliding_window = (
        ["sliding_attention", "full_attention"],
        2,
    )
    assert Speed(model, torch.device("cpu"), "fp32").keys(positions) == 24 + (1 + 2 + 2 + 1 + 2) + 9


def test_an_adapter_is_merged_by_the_command_line_as_at_the_end_of_its_run(
    tiny, corpus_file, tmp_path
):
    from hf_sigmoid.command_line import main as hf_sigmoid_main

    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="ssmax").save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(base)
    keys = {"lora.rank": 4, "train.steps": 3, "optim.log_length_lr": 0.1}
    final = train.main(arguments(str(base), corpus_file, tmp_path / "out", **keys))
    merged = tmp_path / "merged"
    assert not hf_sigmoid_main(["merge", str(final / "adapter"), str(merged), "--base", str(base)])
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (merged, final))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])
    assert not torch.equal(theirs["model.layers.0.self_attn.log_length.slope"], torch.zeros(4))


def test_a_run_of_an_older_release_goes_on(tiny, corpus_file, tmp_path):
    """Written before training was a library: config, log and checkpoint as they lay there."""
    out = tmp_path / "run"
    shutil.copytree(Path(__file__).with_name("run_of_an_older_release"), out)
    config = (out / "config.yaml").read_text()
    for word, path in (("MODEL", tiny), ("TEXT", corpus_file), ("RUN", out)):
        config = config.replace(word, str(path))
    (out / "config.yaml").write_text(config)
    before = (out / "log.jsonl").read_text()
    train.main(arguments(tiny, corpus_file, out))
    assert (out / "log.jsonl").read_text().startswith(before)
    # The rest of the losses that it would have had; other processors sum in another order.
    expected = [4.842788454086062, 4.751755639520615, 4.725935122841283]
    assert losses(out)[6:] == pytest.approx(expected, rel=1e-4)
