"""Two processes (gloo, CPU): parameters of both functions under DDP, FSDP2, tensor parallelism."""

import json
from pathlib import Path

import parallel_worker
import pytest
import releases
import tiny_models
import torch
from gloo import rows_of
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_sigmoid import compat

WORKER, SINCE = Path(parallel_worker.__file__), parallel_worker.SINCE


@pytest.fixture(scope="module", params=("sigmoid", "ssmax"))
def two_processes(request, tmp_path_factory) -> tuple[dict[str, dict], Path]:
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_models.converted("llama", request.param)
    if not releases.has("5.21"):  # it splits an output embedding by equal parts only
        model.resize_token_embeddings(pad_to_multiple_of=2)
    model.save_pretrained(folder)
    return rows_of(WORKER, folder), folder


@pytest.mark.parametrize("way", releases.marked(("ddp", "by_hand", "fsdp2", "tp"), SINCE))
def test_two_processes_give_the_gradients_of_one(two_processes, way):
    found = two_processes[0][way]
    assert found["logits"] < 1e-4 and found["gradients"] < 1e-4
    assert found["holders"] >= 4 and found["holder_gradients"] > 1e-6


@pytest.mark.parametrize("way", releases.marked(("by_hand_bfloat16", "fsdp2_bfloat16"), SINCE))
def test_holders_stay_float32_in_a_sharded_bfloat16_model(two_processes, way):
    found = two_processes[0][way]
    assert found["holder_dtypes"] == ["torch.float32"] and found["sharded"]
    assert found["logits"] < 0.5  # of some 10, at 8 bits


def test_tensor_parallel_ranks_hold_the_numbers_of_their_heads(two_processes):
    assert two_processes[0]["tp"]["local_heads"] == 2  # of four


def test_a_release_that_cannot_shard_a_bfloat16_model_refuses(two_processes, monkeypatch):
    monkeypatch.setattr(compat, "RELEASE", Version("5.22"))
    monkeypatch.setattr(PreTrainedModel, "_is_fsdp_managed_module", True, raising=False)
    assert AutoModelForCausalLM.from_pretrained(two_processes[1]).dtype == torch.float32
    with pytest.raises(ImportError, match=r"bfloat16 .* needs transformers 5.23 or newer"):
        AutoModelForCausalLM.from_pretrained(two_processes[1], dtype=torch.bfloat16)


@pytest.mark.parametrize("way", releases.marked(("fsdp2", "tp"), SINCE))
def test_a_sharded_model_saves_whole(two_processes, way):
    folder = two_processes[1]
    whole = load_file(folder / "model.safetensors")
    again = load_file(folder / way / "model.safetensors")
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    section = json.loads((folder / "config.json").read_text())["hf_sigmoid"]
    assert json.loads((folder / way / "config.json").read_text())["hf_sigmoid"] == section


def test_context_parallelism_is_refused(two_processes):
    refused = two_processes[0]["cp"]["refused"]
    assert "cp_size=2" in refused and "dp_shard_size" in refused
