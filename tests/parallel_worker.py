"""Run by test_parallel.py in two processes: `parallel_worker.py FOLDER`, gloo on the CPU.

Rank 0 prints one JSON line a way of parallelism: its largest differences from one process.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import releases
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import hf_sigmoid

# Since 5.16 transformers shards what it reads, since 5.23 float32 holders in their own groups.
SINCE = {"fsdp2": "5.16", "fsdp2_bfloat16": "5.23"}
TOKENS = torch.randint(5, 99, (4, 12), generator=torch.Generator().manual_seed(2))


def loss(model, ids):
    return model(input_ids=ids, labels=ids).loss


def own_rows():
    return TOKENS[2 * dist.get_rank() :][:2]


def full(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().float()


def gathered(tensor, shape):
    """The whole of a gradient; until 5.16 tensor parallelism leaves a rank its part alone."""
    tensor = full(tensor)
    for dimension, size in enumerate(shape):
        if tensor.shape[dimension] != size:
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, tensor.contiguous())
            tensor = torch.cat(parts, dimension)
    return tensor


def alone(folder):
    """Logits and gradients of one process with the whole batch."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    loss(model, TOKENS).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    with torch.no_grad():
        return model(TOKENS).logits, gradients


def differences(model, ids, expected):
    """Backward over this rank's rows, forward over all, against one process."""
    wanted_logits, wanted = expected
    loss(model, ids).backward()
    given = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    with torch.no_grad():
        logits = full(model(TOKENS).logits)
    assert given.keys() == wanted.keys(), given.keys() ^ wanted.keys()
    given = {name: gathered(given[name], wanted[name].shape) for name in wanted}
    holders = [name for name in given if ".log_length." in name]
    return {
        "logits": float((logits - wanted_logits).abs().max()),
        "gradients": max(float((given[n] - wanted[n]).abs().max()) for n in given),
        "holder_gradients": min(float(given[n].abs().max()) for n in holders),
        "holders": len(holders),
    }


def ddp(folder, expected):
    model = DistributedDataParallel(AutoModelForCausalLM.from_pretrained(folder))
    return differences(model, own_rows(), expected)


def by_hand(folder, dtype):
    """torch's FSDP2: each layer and the float32 holders a group of their own."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    for layer in model.model.layers:
        fully_shard(layer.self_attn.log_length)
        fully_shard(layer)
    return fully_shard(model)


def loaded(folder, dtype):
    """transformers' own, with the same groups."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, distributed_config=DistributedConfig(fsdp_size=2)
    )


def fsdp2(folder, expected, shard, dtype=torch.float32):
    model = shard(folder, dtype)
    sharded = all(hasattr(p, "full_tensor") for p in model.parameters())
    found = differences(model, own_rows(), expected)
    dtypes = {p.dtype for n, p in model.named_parameters() if ".log_length." in n}
    found["holder_dtypes"] = sorted(map(str, dtypes))
    found["sharded"] = sharded
    if shard is loaded and dtype == torch.float32:
        model.save_pretrained(Path(folder) / "fsdp2")
    return found


def tp(folder, expected):
    """Heads are split, and so are the per-query terms; saving gathers them."""
    plan = {"tp_plan": "auto"}
    if releases.has("5.16"):
        plan = {"distributed_config": DistributedConfig(**plan)}
    model = AutoModelForCausalLM.from_pretrained(folder, **plan)
    found = differences(model, TOKENS, expected)
    holder = model.model.layers[0].self_attn.log_length
    local = holder.offset.to_local() if hasattr(holder.offset, "to_local") else holder.offset
    found["local_heads"] = local.shape[0]
    model.save_pretrained(Path(folder) / "tp")
    return found


def cp(folder, expected):
    """accelerate's context parallelism is refused."""
    from accelerate import Accelerator
    from accelerate.utils import ParallelismConfig

    model = AutoModelForCausalLM.from_pretrained(folder)
    accelerator = Accelerator.__new__(Accelerator)
    accelerator.state = type("State", (), {})()
    accelerator.state.parallelism_config = ParallelismConfig(cp_size=2)
    try:
        accelerator.prepare(model)
    except hf_sigmoid.Unsupported as error:
        return {"refused": str(error)}
    return {"refused": ""}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = sys.argv[1]
    expected = alone(folder)
    ways = {
        "ddp": ddp,
        "by_hand": partial(fsdp2, shard=by_hand),
        "by_hand_bfloat16": partial(fsdp2, shard=by_hand, dtype=torch.bfloat16),
        "fsdp2": partial(fsdp2, shard=loaded),
        "fsdp2_bfloat16": partial(fsdp2, shard=loaded, dtype=torch.bfloat16),
        "tp": tp,
        "cp": cp,
    }
    for name, way in ways.items():
        if not releases.has(SINCE.get(name)):
            continue
        found = way(folder, expected)
        dist.barrier()
        if os.environ["RANK"] == "0":
            print(json.dumps({"way": name, **found}), flush=True)
    dist.destroy_process_group()
