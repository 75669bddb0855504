"""continue_pretrain.py on two gloo processes: DDP, FSDP2, tensor parallelism, and both."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import releases
import torch
from accelerate.utils import DistributedType
from packaging.version import Version
from safetensors.torch import load_file
from training_runs import (
    ON_CPU,
    RECIPES,
    arguments,
    launch,
    launcher,
    losses,
    started,
    steps,
    until,
    work,
    workers_of,
)  # fmt: skip
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sigmoid import compat  # isort: skip
from hf_sigmoid.training import checkpointing  # isort: skip
from hf_sigmoid.training import processes  # isort: skip
from hf_sigmoid.training import train  # isort: skip
from hf_sigmoid.training.layout import Division, of_launch  # isort: skip
from hf_sigmoid.errors import BadInput  # isort: skip

# With what `accelerate config` writes besides: loading on one process alone is accelerate's way.
FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}  # fmt: skip
SIZES = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
TENSOR = {**SIZES, "PARALLELISM_CONFIG_TP_SIZE": "2"}
BOTH = {**FSDP, **TENSOR, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}

CONTEXT = {**SIZES, "PARALLELISM_CONFIG_CP_SIZE": "2"}

# Of one process with the same blocks; two halves of a batch, or one that is split by heads.
DIVIDED = {"train.batch_size": 2, "train.grad_accumulation": 2}
WHOLE = {"train.batch_size": 4, "train.grad_accumulation": 2}
WAYS = {
    "ddp": ({}, 2, DIVIDED),
    "fsdp": (FSDP, 2, DIVIDED),
    "fsdp-sharded": (FSDP, 2, {**DIVIDED, "checkpoint.state": "sharded"}),
    "tensor": (TENSOR, 2, WHOLE),
    "tensor-sharded": (TENSOR, 2, {**WHOLE, "checkpoint.state": "sharded"}),
    "fsdp-tensor": (BOTH, 4, DIVIDED),
    "context": (CONTEXT, 2, WHOLE),
    "fsdp-context": ({**FSDP, **CONTEXT}, 4, DIVIDED),
}
# transformers divides weights since 5.16, both ways at once since 5.18.
SINCE = {name: "5.16" for name in WAYS if name not in ("ddp", "context")} | {"fsdp-tensor": "5.18"}
KEYS = {
    "attn": "ssmax", "train.steps": 5, "checkpoint.every": 2, "data.streams": 2,
    "optim.qk_tau": 1.0, "optim.qk_clip": 2.0, "evaluate.path": "builtin", "evaluate.every": 2,
    "evaluate.windows": 3, "evaluate.needle": "[250]", "evaluate.health_every": 2,
}  # fmt: skip


def without_dropout(tiny: str, folder: Path, *, tied: bool) -> str:
    """Dropout draws by shape. With and without one weight for both embeddings."""
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.config.attention_dropout = 0.0
    if not releases.has("5.21"):  # it splits an output embedding by equal parts only
        model.resize_token_embeddings(pad_to_multiple_of=2)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 0.5)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return str(folder)


def followed(out: Path, log: str = "log.jsonl") -> list[list[float]]:
    """Numbers of every step: of the training, the control, the evaluation and the health."""
    rows = []
    for line in map(json.loads, (out / log).read_text().splitlines()):
        row = [line["loss"], line["grad_norm"], *line["qk_lr"], line["max_logit"]]
        row += [line["clipped_heads"], *line.get("held_out", {}).values()]
        row += line.get("needle", {}).values()
        for figures in line.get("health", {}).values():
            row += [-1 if value is None else value for value in figures]
        rows.append(row)
    return rows


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "processes", [2, pytest.param(4, marks=releases.needs("5.16", "every way of four processes"))]
)
def test_a_divided_run_is_the_run_of_one_process_and_resumes(
    tiny, corpus_file, tmp_path, processes, tied
):
    model = without_dropout(tiny, tmp_path / "model", tied=tied)
    alone = tmp_path / "alone"
    train.main(arguments(model, corpus_file, alone, **KEYS, **WHOLE))
    ways = {
        name: way
        for name, way in WAYS.items()
        if way[1] == processes and releases.has(SINCE.get(name))
    }
    jobs = [
        (environment, arguments(model, corpus_file, tmp_path / name, **KEYS, **keys), 4)
        for name, (environment, _, keys) in ways.items()
    ]
    work(jobs, processes=processes)
    theirs = load_file(alone / "final" / "model.safetensors")
    for name in ways:
        out = tmp_path / name
        expected = [pytest.approx(row, rel=2e-4, abs=2e-5) for row in followed(alone)]
        assert followed(out, "finished.jsonl") == expected, name
        ours = load_file(out / "finished" / "model.safetensors")
        assert ours.keys() == theirs.keys(), name
        for tensor in ours:
            torch.testing.assert_close(ours[tensor], theirs[tensor], rtol=1e-3, atol=1e-5)
        # From step 4 on once more, to the last bit.
        assert followed(out) == followed(out, "finished.jsonl"), name
        again = load_file(out / "final" / "model.safetensors")
        assert all(torch.equal(again[tensor], ours[tensor]) for tensor in again | ours), name


@releases.needs("5.16", "FSDP2 of the weights that it reads")
def test_a_whole_state_fits_every_layout_and_a_sharded_one_its_own(
    tiny, corpus_file, tmp_path, capsys
):
    keys = {"attn": "ssmax", "train.steps": 4, "checkpoint.every": 2, "data.streams": 2}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    launch(arguments(tiny, corpus_file, whole, **keys, **DIVIDED), **FSDP)
    train.main(arguments(tiny, corpus_file, whole, **{**keys, "train.steps": 5}, **WHOLE))
    assert "resuming after step 4" in capsys.readouterr().out and len(losses(whole)) == 5

    sharded = {**keys, "checkpoint.state": "sharded"}
    launch(arguments(tiny, corpus_file, parts, **sharded, **DIVIDED), **FSDP)
    kept = sorted(p.name for p in (parts / "checkpoints" / "step_00000004").glob("part_*"))
    assert kept == ["part_00000.safetensors", "part_00001.safetensors"]
    assert not (parts / "checkpoints" / "step_00000004" / "model" / "model.safetensors").exists()
    with pytest.raises(
        BadInput, match=r"sharded state: expected the layout .* FSDP2 2, got one pro"
    ):
        train.main(arguments(tiny, corpus_file, parts, **{**keys, "train.steps": 5}, **WHOLE))


def test_a_signal_to_one_process_saves_the_same_step_of_all(tiny, corpus_file, tmp_path):
    keys = {"train.steps": 10**6, "checkpoint.every": 0, "optim.lr": 1e-5}
    run = started(*launcher(2), *arguments(tiny, corpus_file, tmp_path, **keys), **ON_CPU)
    try:
        until(lambda: steps(tmp_path) > 3, run)
        _, worker = workers_of(run)
        worker.send_signal(signal.SIGUSR1)
        _, errors = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 0, errors[-3000:]
    saved = checkpointing.latest(tmp_path / "checkpoints")
    assert saved.step == len(losses(tmp_path)) and set(saved.manifest["packer"]) == {"0", "1"}


@pytest.mark.parametrize(
    ("world", "environment", "says"),
    [
        (
            2,
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"},
            "fsdp_version: expected 2, got 1",
        ),
        (2, {**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "use train.gradient_checkpointing"),
        (4, {**CONTEXT, **TENSOR}, "parallelism_config_cp_size 2: expected 1 with tp_size 2"),
        (2, {**SIZES, "PARALLELISM_CONFIG_SP_SIZE": "2"}, "parallelism_config_sp_size: expected 1"),
        (4, TENSOR, "tp_size 2 on 4 processes: expected 2 processes, or FSDP2"),
        (2, {**SIZES, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, "expected FSDP2 beside it"),
        (6, {**BOTH, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, "as many processes as"),
    ],
)
def test_a_layout_that_would_be_wrong_is_refused(monkeypatch, world, environment, says):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    accelerator = SimpleNamespace(
        num_processes=world, process_index=0, distributed_type=DistributedType.MULTI_GPU
    )
    with pytest.raises(BadInput) as error:
        of_launch(accelerator)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("world", "environment", "expected"),
    [
        (1, {}, "one process"),
        (8, {}, "data parallel on 8 processes"),
        (8, FSDP, "FSDP2 8"),
        (8, TENSOR | FSDP, "FSDP2 4 × tensor 2"),
        (8, BOTH, "copies 2 × FSDP2 2 × tensor 2"),
        (2, TENSOR, "tensor 2"),
        (2, CONTEXT, "context 2"),
        (8, CONTEXT, "copies 4 × context 2"),
        (8, CONTEXT | FSDP, "FSDP2 4 × context 2"),
    ],
)
def test_a_layout_is_what_the_launcher_says(monkeypatch, world, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    accelerator = SimpleNamespace(
        num_processes=world, process_index=5 % world, distributed_type=DistributedType.MULTI_GPU
    )
    found = of_launch(accelerator)
    assert str(found) == expected and found.world == world
    assert found.data_rank == (5 % world) // (found.tensor * found.context)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"lora.rank": 2}, "lora.rank: expected one process or data parallel with adapters"),
        ({"optim.optimizer": "muon"}, "optim.optimizer: expected adamw with FSDP2"),
        ({"attn": "sdpa"}, "parallelism_config_cp_size 2: .*sdpa"),
        ({"attn": "ssmax", "train.block_size": 47}, "a multiple of the 2 processes"),
    ],
)
def test_what_cannot_be_divided_is_refused(tiny, corpus_file, tmp_path, keys, says):
    environment = CONTEXT if "attn" in keys else FSDP
    with pytest.raises(AssertionError, match=says):
        launch(arguments(tiny, corpus_file, tmp_path / "out", **keys), **environment)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("release", "layout", "says"),
    [
        ("5.15", Division(shard=2, fsdp=True), "FSDP2 2: expected transformers 5.16 or newer"),
        ("5.15", Division(tensor=2), "tensor 2: expected transformers 5.16 or newer"),
        ("5.17", Division(shard=2, tensor=2, fsdp=True), "tensor 2: expected transformers 5.18"),
        ("5.22", Division(replicate=2, shard=2, fsdp=True), "2: expected transformers 5.23"),
    ],
)
def test_a_division_that_came_later_is_refused(
    tiny, corpus_file, tmp_path, monkeypatch, release, layout, says
):
    one = processes.begin("fp32")
    monkeypatch.setattr(compat, "RELEASE", Version(release))
    monkeypatch.setattr(processes, "begin", lambda *_, **__: replace(one, layout=layout))
    with pytest.raises(BadInput) as error:
        train.main(arguments(tiny, corpus_file, tmp_path / "out"))
    assert says in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "world", "layout"),
    [
        ("one_gpu", 1, "one process"),
        ("ddp", 8, "data parallel on 8 processes"),
        ("fsdp2", 8, "FSDP2 8"),
        ("fsdp2_tp", 8, "FSDP2 4 × tensor 2"),
        ("fsdp2_context", 8, "FSDP2 4 × context 2"),
    ],
)
def test_every_yaml_of_accelerate_is_the_layout_that_it_is_named_after(
    monkeypatch, file, world, layout
):
    """Through accelerate's own way from the file to the environment of a process."""
    from accelerate.commands import launch as accelerate_launch
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    path = RECIPES / "accelerate" / f"{file}.yaml"
    parser = accelerate_launch.launch_command_parser()
    args, _, _ = accelerate_launch._validate_launch_command(
        parser.parse_args(["--config_file", str(path), "script.py"])
    )
    assert args.num_processes == world and args.mixed_precision == "no"
    if world == 1:
        _, environment = prepare_simple_launcher_cmd_env(args)
    else:
        environment = prepare_multi_gpu_env(args)
    for name, value in environment.items():
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_")):
            monkeypatch.setenv(name, value)
    accelerator = SimpleNamespace(
        num_processes=world, process_index=0, distributed_type=DistributedType.MULTI_GPU
    )
    assert str(of_launch(accelerator)) == layout
