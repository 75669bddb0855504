"""Run by test_context_parallel.py in two or four processes (gloo, CPU): `context_worker.py`.

Rank 0 prints one JSON line a case: the largest differences of logits and summed gradients from
those of one process with whole rows, each divided by its tensor's largest value.
"""

import json
import math
import os
from functools import partial

import releases
import tiny_models
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

import hf_sigmoid
from hf_sigmoid import masks
from hf_sigmoid.compat import recompute_activations
from hf_sigmoid.context_parallel import context_parallel, split
from hf_sigmoid.context_parallel.gather import Gather

TOKENS = 24
# Documents across the ends of all parts (6, 12, 18), one that ends there, one that is a block.
PACKED = torch.stack(
    [
        torch.cat([torch.arange(length) for length in (5, 9, 1, 9)]),
        torch.cat([torch.arange(length) for length in (12, 12)]),
        torch.arange(TOKENS),
    ]
)
IDS = tiny_models.tokens(len(PACKED), TOKENS)
LABELS = torch.cat([IDS[:, 1:], torch.full((len(IDS), 1), -100)], 1)  # shifted before splitting


def family(kind: str, **options):
    """A random model of a family that tiny_models lacks, its per-query terms learned."""
    config = AutoConfig.for_model(
        kind, vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def learned(model, function, layers=None):
    hf_sigmoid.configure(model, function, learn=True, layers=layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "log_length" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.dim() > 1:
                parameter.mul_(4)
    return model


def half_softmax(function):
    """A conversion that left the second layer softmax."""
    return learned(tiny_models.build("llama"), function, layers=[0])


def loss_of(model, positions, local):
    part = split if local else (lambda whole: whole)
    logits = model(input_ids=part(IDS), position_ids=part(positions), use_cache=False).logits
    total = cross_entropy(logits.flatten(0, 1), part(LABELS).flatten(), reduction="sum")
    return total, logits


def alone(model, positions):
    """Logits and gradients of one process with whole rows."""
    model.zero_grad()
    loss, logits = loss_of(model, positions, local=False)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return logits.detach(), gradients


def split_up(model, positions, inside=True):
    """The same of all processes together; `inside`: the backward pass is within the context."""
    with context_parallel(model, None, positions):
        loss, logits = loss_of(model, positions, local=True)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    gradients = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            gradients[name.removeprefix("module.")] = p.grad
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.detach().contiguous())
    return torch.cat(parts, 1), gradients


def relative(given, expected):
    return float((given - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def compare(given, expected):
    assert given[1].keys() == expected[1].keys(), given[1].keys() ^ expected[1].keys()
    errors = {name: relative(given[1][name], expected[1][name]) for name in given[1]}
    holders = [name for name in errors if ".log_length." in name]
    others = [name for name in errors if name not in holders]
    return {
        "logits": relative(given[0], expected[0]),
        "gradients": max(errors[name] for name in others),
        "holders": max((errors[name] for name in holders), default=0.0),
        "attended": min(
            float(expected[1][name].abs().max()) for name in others if "mlp" not in name
        ),
    }


def check(model, positions=PACKED, **options):
    return compare(split_up(model, positions, **options), alone(model, positions))


def checkpointed(function, use_reentrant, **options):
    model = tiny_models.converted("llama", function).train()
    expected = alone(model, PACKED)
    recompute_activations(model, use_reentrant=use_reentrant)
    return compare(split_up(model, PACKED, **options), expected)


def local_lengths(function):
    """What a rank that counted its own keys only would compute."""
    original = masks.visible_keys

    def visible_keys(mask, M, *rest):
        *found, log_n = original(mask, M, *rest)
        return *found, log_n.clamp(max=math.log(M))

    model = tiny_models.converted("llama", function)
    expected = alone(model, PACKED)
    masks.visible_keys = visible_keys
    try:
        return compare(split_up(model, PACKED), expected)
    finally:
        masks.visible_keys = original


def compiled(function):
    model = tiny_models.converted("llama", function)
    expected = alone(model, PACKED)
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager")
    given = None
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        given = split_up(run, PACKED)
    gradients = {name.removeprefix("_orig_mod."): each for name, each in given[1].items()}
    return compare((given[0], gradients), expected)


def ddp(function):
    """Every process of DDP is in the group; it averages, so the loss is multiplied."""
    model = tiny_models.converted("llama", function)
    expected = alone(model, PACKED)
    wrapped = DistributedDataParallel(model)
    with context_parallel(wrapped, None, PACKED):
        loss, logits = loss_of(wrapped, PACKED, local=True)
        (loss * dist.get_world_size()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return compare((logits.detach(), gradients), (split(expected[0]), expected[1]))


def two_groups(function):
    """Two rows of data parallel processes, each row's sequence split over two."""
    mine = dist.get_rank() // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = tiny_models.converted("llama", function)
    rows = slice(mine, mine + 1)
    whole = alone(model, PACKED)
    with context_parallel(model, groups[mine], PACKED[rows]), torch.no_grad():
        logits = model(
            input_ids=split(IDS[rows], groups[mine]),
            position_ids=split(PACKED[rows], groups[mine]),
            use_cache=False,
        ).logits
    expected = split(whole[0][rows], groups[mine])
    return {"logits": relative(logits, expected), "gradients": 0.0, "holders": 0.0, "attended": 1.0}


def different_rows():
    """Every process must raise, or the others would wait for it."""
    positions = torch.arange(TOKENS)[None] + dist.get_rank()
    try:
        with context_parallel(tiny_models.converted("llama", "ssmax"), None, positions):
            return {"refused": ""}
    except ValueError as error:
        return {"refused": str(error)}


def bfloat16_gather():
    """The sum of everybody's gradients, in the dtype of the keys."""
    part = torch.full((1, 1, 2, 3), 1.0 + dist.get_rank(), dtype=torch.bfloat16, requires_grad=True)
    whole = Gather.apply(part, None, 2 * dist.get_world_size())
    whole.sum().backward()
    expected = torch.arange(1.0, dist.get_world_size() + 1).repeat_interleave(2)
    return {
        "values": bool((whole[0, 0, :, 0].float() == expected).all()),
        "gradient": bool((part.grad == dist.get_world_size()).all()),
    }


SLIDING = ["sliding_attention", "full_attention"]
FAMILIES = {
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "gemma2": {"sliding_window": 7, "attn_logit_softcapping": 5.0},
    "phi3": {"sliding_window": None},
    "olmo2": {},
    "cohere2": {"sliding_window": 7, "layer_types": SLIDING},
}
SINKS = {"sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 2}


def of_family(kind, options, function):
    return check(learned(family(kind, **options), function))


def sinks():
    """In one process gpt_oss keeps documents apart by cu_seq_lens only, so here it gets one."""
    return check(learned(family("gpt_oss", **SINKS), "ssmax"), PACKED[-1:])


# By name: what is done with one of the two functions.
CASES = {
    **{kind: partial(lambda kind, function: check(tiny_models.converted(kind, function)), kind)
       for kind in tiny_models.DECODERS},
    **{kind: partial(of_family, kind, options) for kind, options in FAMILIES.items()},
    # Wider than a part: what is seen within one does not tell it from no window.
    "wide_window": partial(of_family, "mistral", {"sliding_window": 14}),
    "one_row_of_positions": lambda f: check(tiny_models.converted("llama", f), PACKED[:1]),
    "float64": lambda f: check(learned(tiny_models.build("gpt2"), f).double()),
    "some_softmax": lambda f: check(half_softmax(f)),
    "checkpointed_inside": lambda f: checkpointed(f, False, inside=True),
    "checkpointed_after": lambda f: checkpointed(f, False, inside=False),
    "reentrant_inside": lambda f: checkpointed(f, True, inside=True),
    "reentrant_after": lambda f: checkpointed(f, True, inside=False),
    "backward_after": lambda f: check(tiny_models.converted("llama", f), inside=False),
    "ddp": ddp,
    "compiled": compiled,
    "local_lengths": local_lengths,
}  # fmt: skip
# Of four processes what may depend on their number.
FOUR = ("llama", "gemma3", "wide_window", "float64", "checkpointed_inside", "ddp")


def since(name: str) -> str | None:
    """Until 5.5 a default of some configs is not of the type that they declare."""
    return "5.5" if name.startswith(("olmo2", "cohere2")) else None


def cases(size: int) -> dict:
    """Every case of this many processes."""
    chosen = CASES if size == 2 else {name: CASES[name] for name in FOUR}
    found = {
        f"{name}-{function}": partial(case, function)
        for function in ("sigmoid", "ssmax")
        for name, case in chosen.items()
    }
    if size == 2:
        found["sinks-ssmax"] = sinks
        found["bfloat16_gather"] = bfloat16_gather
    else:
        found["two_groups-sigmoid"] = partial(two_groups, "sigmoid")
    return {**found, "different_rows": different_rows}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, case in cases(dist.get_world_size()).items():
        if not releases.has(since(name)):
            continue
        found = case()
        dist.barrier()
        if os.environ["RANK"] == "0":
            print(json.dumps({"case": name, **found}), flush=True)
    dist.destroy_process_group()
