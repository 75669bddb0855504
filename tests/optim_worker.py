"""Run in two processes, gloo on the CPU: `optim_worker.py FOLDER optim` or `… monitor`.

Rank 0 prints one JSON line a way of splitting weights, of differences from one process: for
test_optim.py of three steps under QuacK and a QK-clip, for test_monitor.py of what is recorded
while one step is made, and of the probe's figures before and after it.
"""

import copy
import json
import os
import sys
from functools import partial

import releases
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig
from transformers.distributed.configuration_utils import DistributedConfig

import hf_sigmoid
from hf_sigmoid.compat import mesh_of
from hf_sigmoid.logit_control.monitor import Health, all_reduce_max, record
from hf_sigmoid.optim import QKClip, QuacK, find_heads

# transformers shards what it reads since 5.16; until then tensor parallelism has no DTensor.
SINCE = {
    "optim": {"transformers_fsdp2": "5.16", "transformers_tp": "5.16"},
    "monitor": {"transformers_fsdp2": "5.16"},
}
IDS = torch.arange(3, 10)[None]
TOKENS = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(9))
SIZES = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**SIZES, "intermediate_size": 48, "num_hidden_layers": 2, "attention_bias": True}
CONFIGS = {
    "grouped": LlamaConfig(
        **LLAMA, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0
    ),
    # Three heads over two processes: half of the second is in each.
    "straddling": LlamaConfig(
        **LLAMA, hidden_size=24, num_attention_heads=3, num_key_value_heads=3, pad_token_id=0
    ),
    "sigmoid": LlamaConfig(
        **LLAMA, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0
    ),
    # Weights [in 15, out 45] and biases [45] of which one process has more.
    "uneven": GPT2Config(**SIZES, n_embd=15, n_head=3, n_layer=2),
}


def dtype(kind):
    """FSDP2 wants one, and per-query terms are float32."""
    return torch.float32 if kind == "sigmoid" else torch.float64


def build(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind])).to(dtype(kind)).eval()
    if kind == "sigmoid":
        hf_sigmoid.configure(model, "sigmoid", learn=True, query=True)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "log_length" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                elif parameter.dim() > 1:
                    parameter.mul_(4)  # logits that differ
    return model


def whole(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach()


def train(model, heads, split_batch):
    """The weights after three steps, and what QuacK would save."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    control = QuacK(optimizer, heads, tau=0.3)
    for seed in range(3):
        ids = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(seed))
        ids = ids[2 * dist.get_rank() :][:2] if split_batch else ids
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.named_parameters(), control


def clip(heads):
    """Each process saw other heads' largest logits, some above the threshold."""
    control = QKClip(heads, threshold=30.0, alpha=0.3)
    seen = {}
    for number, (name, block) in enumerate(heads.blocks.items()):
        logits = 10.0 + 15.0 * (torch.arange(block["query"].heads) + number)
        if dist.get_world_size() > 1:
            logits[1 - dist.get_rank() :: 2] = -torch.inf
        seen[name] = logits
    return control.clip(seen)


def difference(kind, split):
    """`split` gives a model whose weights are split, its heads, and whether its batch is."""
    plain = build(kind)
    whole_heads = find_heads(plain, IDS)
    expected, control = train(plain, whole_heads, False)
    model, heads, split_batch = split(kind)
    given, found = train(model, heads, split_batch)
    multipliers, wanted = found.multipliers(), control.multipliers()
    clipped = [clip(each) for each in (heads, whole_heads)]
    given = {name.removeprefix("module."): whole(p) for name, p in given}
    assert given.keys() == dict(expected).keys()
    pairs = [(given[name], p.detach()) for name, p in plain.named_parameters()]
    ours, theirs = found.state_dict(), control.state_dict()
    assert ours.keys() == theirs.keys()
    pairs += [(ours[name], theirs[name]) for name in ours]
    pairs += [(multipliers[n][k], wanted[n][k]) for n in wanted for k in wanted[n]]
    return {
        "difference": max((one - other).abs().max().item() for one, other in pairs),
        "clipped": clipped,
        # Different for every head: rows that got another's would show.
        "spread": min(each["key"].std().item() for each in wanted.values()),
    }


def step(model, split_batch):
    """What is recorded while one step is made."""
    ids = TOKENS[2 * dist.get_rank() :][:2] if split_batch else TOKENS
    with record(model) as recorder:
        model(ids, labels=ids, use_cache=False).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [all_reduce_max(recorder.max_logits(final=final)) for final in (False, True)]


def measured(model, split_batch):
    health = Health(model, TOKENS[:1])
    before = health.measure()
    recorded = step(model, split_batch)
    return before, health.measure(), recorded, health.state_dict()


def monitored(kind, split):
    """Figures of a split model against those of a whole one."""
    model, _, split_batch = split(kind)
    ours, theirs = measured(model, split_batch), measured(build(kind), False)
    found = {"recorded": 0.0, "figures": 0.0, "state": 0.0}
    for mine, other in zip(ours[2], theirs[2], strict=True):
        assert mine.keys() == other.keys() and len(mine) == 2
        found["recorded"] = max(
            found["recorded"], *((mine[n] - other[n]).abs().max().item() for n in mine)
        )
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        assert mine.keys() == other.keys() and len(mine) == 2
        for name, figures in other.items():
            for key, figure in figures.items():
                given = mine[name][key]
                if figure is None:
                    assert given is None
                    continue
                gap = (torch.as_tensor(given) - torch.as_tensor(figure)).abs().max().item()
                found["figures"] = max(found["figures"], gap)
    assert ours[3].keys() == theirs[3].keys()
    gaps = [(ours[3][n] - theirs[3][n]).abs().nan_to_num().max().item() for n in theirs[3]]
    changes = [figures["mean_change"].min().item() for figures in theirs[1].values()]
    return {**found, "state": max(gaps), "least_change": min(changes)}


def ddp(kind):
    model = build(kind)
    heads = find_heads(model, IDS)
    return DistributedDataParallel(model), heads, True


def fsdp2(kind, **options):
    model = build(kind)
    heads = find_heads(model, IDS)
    for layer in [m for m in model.modules() if type(m).__name__.endswith(("Layer", "Block"))]:
        fully_shard(layer, **options)
    return fully_shard(model, **options), heads, True


def meshed(kind, shape):
    """Replicas of shards: one dimension of the mesh splits, the other repeats."""
    return fsdp2(kind, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts")))


def columns(kind):
    def placement(parameter):
        return Shard(1) if parameter.dim() > 1 else Shard(0)

    return fsdp2(kind, shard_placement_fn=placement)


def transformers(kind, folder, **options):
    """Sharded as it is loaded: the heads are those of a twin without memory."""
    has_config = releases.has("5.16")
    model = AutoModelForCausalLM.from_pretrained(
        f"{folder}/{kind}", dtype=dtype(kind),
        **({"distributed_config": DistributedConfig(**options)} if has_config else options),
    ).eval()  # fmt: skip
    assert mesh_of(model) is not None
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(f"{folder}/{kind}"))
    heads = find_heads(twin, IDS)
    return model, heads.bind(model) if has_config else None, "fsdp_size" in options


def refused(split):
    """Why heads are not sought in a model that is split already."""
    model, _, _ = split("grouped")
    try:
        find_heads(model, IDS)
    except ValueError as error:
        return {"message": str(error)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, what = sys.argv[1:]
    if os.environ["RANK"] == "0":
        for kind in ("grouped", "sigmoid"):
            build(kind).save_pretrained(f"{folder}/{kind}")
    dist.barrier()
    sharded, parallel = {"fsdp_size": 2}, {"tp_plan": "auto"}
    ways = {
        "ddp": ("grouped", ddp),
        "fsdp2": ("grouped", fsdp2),
        "fsdp2_straddling": ("straddling", fsdp2),
        "fsdp2_uneven": ("uneven", fsdp2),
        "fsdp2_columns": ("straddling", columns),
        "mesh_1_2": ("straddling", lambda kind: meshed(kind, (1, 2))),
        "mesh_2_1": ("straddling", lambda kind: meshed(kind, (2, 1))),
        "transformers_fsdp2": ("grouped", lambda kind: transformers(kind, folder, **sharded)),
        "transformers_tp": ("grouped", lambda kind: transformers(kind, folder, **parallel)),
    }
    checks = {name: partial(difference, *way) for name, way in ways.items()}
    for name in ("fsdp2", "transformers_tp"):
        checks[f"refused_{name}"] = partial(refused, ways[name][1])
    if what == "monitor":
        kept = ("ddp", "transformers_fsdp2", "transformers_tp")
        checks = {name: partial(monitored, "sigmoid", ways[name][1]) for name in kept}
    for name, check in checks.items():
        if not releases.has(SINCE[what].get(name)):
            continue
        found = check()
        dist.barrier()
        if os.environ["RANK"] == "0":
            print(json.dumps({"way": name, **found}), flush=True)
    dist.destroy_process_group()
