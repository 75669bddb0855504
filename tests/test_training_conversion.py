"""Converting in the middle of training: the optimiser's state stays with its parameters."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import tiny_models
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_sigmoid import text
from hf_sigmoid.command_line import main as command
from hf_sigmoid.conversions.training import convert_training

RECIPES = Path(__file__).parents[1] / "recipes"
sys.path.insert(0, str(RECIPES))

from hf_sigmoid.training import train  # noqa: E402

SMALL = {"window": 32, "windows": 6, "progress": False}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("source")
    tiny_models.byte_llama(folder).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    pieces = text.train().split("\n\n")[:60]
    file.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    return str(file)


@pytest.fixture(scope="module")
def run(source, corpus_file, tmp_path_factory) -> Path:
    """Eight steps of softmax training, every fourth kept."""
    out = tmp_path_factory.mktemp("run") / "out"
    train.main(
        [f"model={source}", f"output_dir={out}", f"data.path={corpus_file}", "train.steps=8",
         "train.block_size=32", "train.batch_size=4", "optim.lr=3e-3", "optim.log_length_lr=0",
         "checkpoint.every=4"]
    )  # fmt: skip
    return out


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def test_a_run_goes_on_as_ssmax_where_softmax_stopped(run, tmp_path):
    """Frozen at its identity, ssmax repeats the softmax run: weights, moments, step are there."""
    target = tmp_path / "ssmax"
    convert_training(run / "checkpoints" / "step_00000004", target, "ssmax", **SMALL)
    assert len(losses(target)) == 4
    train.main(["--config", str(target / "config.yaml"), f"output_dir={target}"])
    assert losses(target) == pytest.approx(losses(run), rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(target / "final")
    assert model.config._attn_implementation == "ssmax"
    # Without the moments the fifth step would be Adam's first.
    fresh = tmp_path / "fresh"
    convert_training(run / "checkpoints" / "step_00000004", fresh, "ssmax", **SMALL)
    state = fresh / "checkpoints" / "step_00000004" / "optimizer.safetensors"
    kept = load_file(state)
    assert not any("log_length" in name for name in kept)
    assert all(t.item() == 4 for name, t in kept.items() if name.endswith("/step"))


def test_row_numbers_start_fresh_and_train_in_a_converted_run(run, tmp_path):
    target = tmp_path / "sigmoid"
    report = convert_training(
        run / "checkpoints" / "step_00000004", target, "sigmoid", init="calibrated-query", **SMALL
    )
    assert report["plan"]["function"] == "sigmoid"
    config = (target / "config.yaml").read_text()
    assert "log_length_lr: 0.0" in config
    config = config.replace("log_length_lr: 0.0", "log_length_lr: 0.01")
    (target / "config.yaml").write_text(config)
    start = load_file(target / "checkpoints" / "step_00000004" / "model" / "model.safetensors")
    train.main(["--config", str(target / "config.yaml"), f"output_dir={target}"])
    end = load_file(target / "final" / "model.safetensors")
    assert not any(torch.equal(start[name], end[name]) for name in end if "log_length" in name)
    last = load_file(target / "checkpoints" / "step_00000008" / "optimizer.safetensors")
    steps = {name: t.item() for name, t in last.items() if name.endswith("/step")}
    assert {v for name, v in steps.items() if "log_length" in name} == {4}
    assert {v for name, v in steps.items() if "log_length" not in name} == {8}


def test_the_command_knows_a_training_checkpoint(run, tmp_path, capsys):
    step = str(run / "checkpoints" / "step_00000004")
    options = ["--to", "ssmax", "--window", "32", "--windows", "4"]
    assert command(["convert", step, str(tmp_path / "out"), *options]) == 0
    assert (tmp_path / "out" / "checkpoints" / "step_00000004" / "manifest.json").is_file()
    assert "resume" in capsys.readouterr().out


# accelerate


def training(folder: str, *, row_numbers: bool):
    """A user's own loop: a decayed and an undecayed group, a schedule, two steps before saving."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    named = [(n, p) for n, p in model.named_parameters() if "log_length" not in n]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    if row_numbers:
        numbers = [p for n, p in model.named_parameters() if "log_length" in n]
        optimizer.add_param_group({"params": numbers})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    accelerator = Accelerator(cpu=True)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def steps(accelerator, model, optimizer, scheduler, count: int, first: int = 0) -> list[float]:
    found = []
    for step in range(first, first + count):
        ids = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(step))
        loss = model(ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.fixture
def state(source, tmp_path) -> tuple[Path, list[float]]:
    """An accelerate state folder after two steps, and the losses of the three that follow."""
    accelerator, *parts = training(source, row_numbers=False)
    steps(accelerator, *parts, count=2)
    accelerator.save_state(str(tmp_path / "state"))
    return tmp_path / "state", steps(accelerator, *parts, count=3, first=2)


def test_an_accelerate_state_goes_on_with_its_moments(state, source, tmp_path):
    folder, expected = state
    target = tmp_path / "ssmax"
    convert_training(folder, target, "ssmax", base=source, **SMALL)
    for name in ("report.json", "report.md", "README.md"):
        told = (target / "model" / name).read_text().replace(str(folder), "")
        assert tempfile.gettempdir() not in told
    accelerator, model, optimizer, scheduler = training(target / "model", row_numbers=True)
    accelerator.load_state(str(target))
    optimizer.param_groups[-1]["lr"] = 0.0
    inner = optimizer.optimizer
    assert {s["step"].item() for s in inner.state.values()} == {2.0}
    numbers = [p for n, p in model.named_parameters() if "log_length" in n]
    assert not any(p in inner.state for p in numbers)
    found = steps(accelerator, model, optimizer, scheduler, count=1, first=2)
    assert found == pytest.approx(expected[:1], rel=1e-5)
    assert all(p in inner.state for p in numbers)
    # The step after the first update tells: other moments or another rate, and it would differ.
    scheduler.scheduler.base_lrs[-1] = 0.0
    found += steps(accelerator, model, optimizer, scheduler, count=2, first=3)
    assert found == pytest.approx(expected, rel=2e-3)


def test_a_state_of_tied_weights_and_without_a_schedule_goes_on(tmp_path):
    tokenizer = tiny_models.byte_tokenizer()
    config = tiny_models.config("llama")
    config.vocab_size, config.tie_word_embeddings = len(tokenizer), True
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")

    def begin(folder, row_numbers):
        model = AutoModelForCausalLM.from_pretrained(folder)
        named = dict(model.named_parameters())
        old = [p for name, p in named.items() if "log_length" not in name]
        optimizer = torch.optim.AdamW(old, lr=1e-2)
        if row_numbers:
            new = [p for name, p in named.items() if "log_length" in name]
            optimizer.add_param_group({"params": new, "lr": 0.0})
        accelerator = Accelerator(cpu=True)
        return accelerator, *accelerator.prepare(model, optimizer)

    class Nothing:
        def step(self):
            pass

    accelerator, model, optimizer = begin(tmp_path / "base", False)
    steps(accelerator, model, optimizer, Nothing(), count=2)
    accelerator.save_state(str(tmp_path / "state"))
    expected = steps(accelerator, model, optimizer, Nothing(), count=2, first=2)
    convert_training(tmp_path / "state", tmp_path / "out", "ssmax", base=tmp_path / "base", **SMALL)
    accelerator, model, optimizer = begin(tmp_path / "out" / "model", True)
    accelerator.load_state(str(tmp_path / "out"))
    optimizer.param_groups[-1]["lr"] = 0.0
    assert model.lm_head.weight is model.model.embed_tokens.weight
    found = steps(accelerator, model, optimizer, Nothing(), count=2, first=2)
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_schedule_of_schedules_goes_on_and_weights_keep_their_dtype(source, tmp_path):
    """A base in bfloat16, trained in float32: not a bit of the training is rounded away."""
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(half)
    tiny_models.byte_tokenizer().save_pretrained(half)
    model = AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accelerator = Accelerator(cpu=True)
    parts = accelerator.prepare(model, optimizer, _schedule(optimizer))
    steps(accelerator, *parts, count=2)
    accelerator.save_state(str(tmp_path / "state"))
    convert_training(tmp_path / "state", tmp_path / "out", "ssmax", base=half, **SMALL)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "state"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    named = dict(model.named_parameters())
    numbers = [p for name, p in named.items() if "log_length" in name]
    optimizer = torch.optim.AdamW([p for n, p in named.items() if "log_length" not in n], lr=1e-2)
    optimizer.add_param_group({"params": numbers})
    accelerator = Accelerator(cpu=True)
    parts = accelerator.prepare(model, optimizer, _schedule(optimizer))
    accelerator.load_state(str(tmp_path / "out"))
    assert len(steps(accelerator, *parts, count=3, first=2)) == 3


def _schedule(optimizer):
    from torch.optim import lr_scheduler

    parts = [
        lr_scheduler.ConstantLR(optimizer, 0.5, 1),
        lr_scheduler.CosineAnnealingLR(optimizer, 9),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


@pytest.mark.parametrize(
    "case, words",
    [
        ("no base", "--base names the checkpoint"),
        ("a model", "expected a checkpoint of continue_pretrain.py"),
        ("pickled weights", "pickles are not read"),
        ("alone", "must be in its run's folder"),
        ("truncated", "is damaged: optimizer.safetensors has 100 bytes"),
        ("a base too many", "--base is of an accelerate state folder"),
        ("several models", "must hold one model, optimiser and schedule"),
        ("a damaged optimiser", "optimizer.bin cannot be read"),
        ("another optimiser", "is of another model"),
        ("a full target", "is not empty"),
    ],
)
def test_bad_input_is_named_and_writes_nothing(state, run, source, tmp_path, case, words):
    folder, target = state[0], tmp_path / "out"
    base = source
    if case == "no base":
        base = None
    elif case == "a model":
        folder = source
    elif case == "pickled weights":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif case == "alone":
        base = None
        folder = tmp_path / "x" / "y" / "step_00000004"
        folder.parent.mkdir(parents=True)
        (run / "checkpoints" / "step_00000004").rename(folder)
    elif case in ("truncated", "a base too many"):
        shutil.copytree(run, tmp_path / "copy")
        folder = tmp_path / "copy" / "checkpoints" / "step_00000004"
        if case == "truncated":
            base = None
            data = (folder / "optimizer.safetensors").read_bytes()
            (folder / "optimizer.safetensors").write_bytes(data[:100])
    elif case == "several models":
        shutil.copy(folder / "optimizer.bin", folder / "optimizer_1.bin")
    elif case == "a damaged optimiser":
        (folder / "optimizer.bin").write_bytes(b"nothing")
    elif case == "another optimiser":
        optimizer = torch.load(folder / "optimizer.bin", weights_only=True)
        optimizer["state"][0]["exp_avg"] = torch.zeros(7, 7)
        torch.save(optimizer, folder / "optimizer.bin")
    elif case == "a full target":
        target.mkdir()
        (target / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    try:
        with pytest.raises(ValueError, match=words):
            convert_training(folder, target, "ssmax", base=base, **SMALL)
        assert sorted(tmp_path.rglob("*")) == before
    finally:
        if case == "alone":
            folder.rename(run / "checkpoints" / "step_00000004")
