"""Two processes (gloo, CPU): parameters of both functions under DDP, FSDP2, tensor parallelism."""

import json
from pathlib import Path

import pytest
import tiny_models
import torch
from gloo import rows_of
from safetensors.torch import load_file

WORKER = Path(__file__).with_name("parallel_worker.py")


@pytest.fixture(scope="module", params=("sigmoid", "ssmax"))
def two_processes(request, tmp_path_factory) -> tuple[dict[str, dict], Path]:
    folder = tmp_path_factory.mktemp(request.param)
    tiny_models.converted("llama", request.param).save_pretrained(folder)
    return rows_of(WORKER, folder), folder


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "tp"])
def test_two_processes_give_the_gradients_of_one(two_processes, way):
    found = two_processes[0][way]
    assert found["logits"] < 1e-4 and found["gradients"] < 1e-4
    assert found["holders"] >= 4 and found["holder_gradients"] > 1e-6


def test_holders_stay_float32_in_a_sharded_bfloat16_model(two_processes):
    found = two_processes[0]["fsdp2_bfloat16"]
    assert found["holder_dtypes"] == ["torch.float32"] and found["sharded"]
    assert found["logits"] < 0.5  # of some 10, at 8 bits


def test_tensor_parallel_ranks_hold_the_numbers_of_their_heads(two_processes):
    assert two_processes[0]["tp"]["local_heads"] == 2  # of four


@pytest.mark.parametrize("saved", ["fsdp2-float32", "tp"])
def test_a_sharded_model_saves_whole(two_processes, saved):
    folder = two_processes[1]
    whole = load_file(folder / "model.safetensors")
    again = load_file(folder / saved / "model.safetensors")
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    section = json.loads((folder / "config.json").read_text())["hf_sigmoid"]
    assert json.loads((folder / saved / "config.json").read_text())["hf_sigmoid"] == section


def test_context_parallelism_is_refused(two_processes):
    refused = two_processes[0]["cp"]["refused"]
    assert "cp_size=2" in refused and "dp_shard_size" in refused
