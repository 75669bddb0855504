"""QuacK: every head's rate by hand, in any layout, and nothing else touched."""

import pytest
import tiny_models
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Qwen2Config,
)

from hf_sigmoid.optim import QuacK

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IDS = torch.arange(3, 10)[None]
HEADS, GROUPS, DIM = 4, 2, 8


def build(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()  # without dropout


def grouped():
    return build(LlamaConfig(**SIZES, num_key_value_heads=GROUPS))


def step(model, optimizer, seed=0):
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(seed))
    model(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def blocks(weight, heads):
    """Norms of the heads' blocks of rows."""
    return weight.view(heads, -1).norm(dim=1)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_each_heads_update_is_that_of_its_rate(kind):
    """Against two plain runs: one step of each, the second from weights that have moved."""
    tau = 0.3
    options = {"lr": 0.05, "weight_decay": 0.1}
    model, plain = grouped(), grouped()
    optimizer, reference = (kind(m.parameters(), **options) for m in (model, plain))
    control = QuacK(optimizer, model, IDS, tau=tau)
    start = weights(model)
    for seed in range(3):
        before = weights(model)
        plain.load_state_dict(before)
        step(model, optimizer, seed)
        step(plain, reference, seed)
        free, found = weights(plain), weights(model)
        for name, weight in found.items():
            layer = name.rpartition(".self_attn.")[0] + ".self_attn"
            update = free[name] - before[name]
            if "q_proj" in name:
                key = f"{layer}.k_proj.weight"
                rate = blocks(start[key], GROUPS) / blocks(before[key], GROUPS)
                rate = rate.repeat_interleave(HEADS // GROUPS).repeat_interleave(DIM)[:, None]
            elif "k_proj" in name:
                query = f"{layer}.q_proj.weight"
                first, now = (
                    blocks(w[query], HEADS).view(GROUPS, -1).amax(1) for w in (start, before)
                )
                rate = (first / now).repeat_interleave(DIM)[:, None]
            else:
                rate = 1 / tau
            torch.testing.assert_close(weight, before[name] + tau * rate * update)
    moved = torch.stack([m["query"] for m in control.multipliers().values()]) / tau
    assert (moved - 1).abs().max() > 1e-3  # the norms did move


def test_an_adam_whose_gradients_are_scaled_would_not_do():
    """Why the update is scaled: Adam's first step does not depend on the gradient's size."""
    model, plain = grouped(), grouped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    QuacK(optimizer, model, IDS, tau=0.1)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    before = weights(model)
    step(model, optimizer)
    step(plain, reference)
    name = "model.layers.0.self_attn.q_proj.weight"
    ratio = (weights(model)[name] - before[name]).norm() / (
        weights(plain)[name] - before[name]
    ).norm()
    assert ratio == pytest.approx(0.1, rel=1e-3)


ROWS = torch.arange(96)
LAYOUTS = {
    "fused, head by head": (GPTNeoXConfig(**SIZES), "query_key_value", ROWS % 24 < 16),
    "fused, transposed": (
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2),
        "c_attn",
        ROWS < 64,
    ),
    "with biases": (Qwen2Config(**SIZES, num_key_value_heads=2), ("q_proj", "k_proj"), None),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_rows_of_queries_and_keys_are_scaled(layout):
    config, names, rows = LAYOUTS[layout]
    tau, options = 0.25, {"lr": 1.0, "weight_decay": 0.0}
    model, plain = build(config), build(config)
    optimizer = torch.optim.SGD(model.parameters(), **options)
    QuacK(optimizer, model, IDS, tau=tau)
    before = weights(model)
    step(model, optimizer)
    step(plain, torch.optim.SGD(plain.parameters(), **options))
    free = weights(plain)
    for name, weight in weights(model).items():
        share = torch.ones(())
        if any(part in name for part in ([names] if isinstance(names, str) else names)):
            share = torch.tensor(tau) if rows is None else torch.where(rows, tau, 1.0)
            if name.endswith("weight") and layout == "fused, head by head":
                share = share[:, None]
        expected = before[name] + share * (free[name] - before[name])
        torch.testing.assert_close(weight, expected, atol=1e-6, rtol=1e-5)


def test_latent_attention_follows_its_six_factors():
    config = DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=8, v_head_dim=6,
        qk_rope_head_dim=4, qk_nope_head_dim=10, first_k_dense_replace=2,
    )  # fmt: skip
    model = build(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    control = QuacK(optimizer, model, IDS, tau=0.5)
    module = model.model.layers[0].self_attn

    def norms():
        up = module.q_b_proj.weight.detach().view(4, 14, 16)
        kv = module.kv_b_proj.weight.detach().view(4, 16, 8)
        down = module.kv_a_proj_with_mqa.weight.detach()
        return {
            "dq": module.q_a_proj.weight.detach().norm(), "uq": up[:, :10].flatten(1).norm(dim=1),
            "qr": up[:, 10:].flatten(1).norm(dim=1), "uk": kv[:, :10].flatten(1).norm(dim=1),
            "dkv": down[:8].norm(), "kr": down[8:].norm(),
        }  # fmt: skip

    def expected(n):
        most = (n["uq"] * n["uk"]).max() * n["dkv"]
        rotated = n["qr"].max() * n["kr"]
        return {
            "uq": 1 / (n["dq"] * n["uk"] * n["dkv"]), "uk": 1 / (n["uq"] * n["dq"] * n["dkv"]),
            "qr": 1 / (n["dq"] * n["kr"]).expand(4), "dq": torch.minimum(1 / most, 1 / rotated),
            "dkv": 1 / (most / n["dkv"] * n["dq"]), "kr": 1 / (n["qr"].max() * n["dq"]),
        }  # fmt: skip

    first = expected(norms())
    with torch.no_grad():
        for weight in (module.q_b_proj.weight, module.kv_b_proj.weight, module.q_a_proj.weight):
            weight.mul_(1 + torch.rand(weight.shape[0], 1))
    now, found = expected(norms()), control.multipliers()["model.layers.0.self_attn"]
    assert found.keys() == now.keys()
    for key, multiplier in found.items():
        by_hand = (0.5 * now[key] / first[key]).expand_as(multiplier)
        torch.testing.assert_close(multiplier, by_hand)


def test_a_resumed_run_keeps_the_norms_it_began_with():
    model = grouped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    control = QuacK(optimizer, model, IDS)
    for seed in range(3):
        step(model, optimizer, seed)
    saved = control.state_dict()
    again = grouped()
    again.load_state_dict(model.state_dict())
    fresh = QuacK(torch.optim.AdamW(again.parameters(), lr=0.05), again, IDS)
    name = "model.layers.0.self_attn"
    assert (fresh.multipliers()[name]["query"] == 1).all()
    fresh.load_state_dict(saved)
    ours, theirs = (c.multipliers()[name]["query"] for c in (fresh, control))
    assert torch.equal(ours, theirs) and not (ours == 1).all()
    with pytest.raises(ValueError, match="the same attention modules"):
        fresh.load_state_dict({key: t for key, t in saved.items() if "layers.0" in key})


def test_the_constant_rule_and_taking_it_off():
    model = grouped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    control = QuacK(optimizer, model, IDS, tau=0.1, rule="constant")
    step(model, optimizer)
    every = [m for each in control.multipliers().values() for m in each.values()]
    assert all((m == 0.1).all() for m in every)
    control.remove()
    before, plain = weights(model), grouped()
    plain.load_state_dict(model.state_dict())
    step(model, optimizer, 1)
    step(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 1)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(weights(model)[name], weights(plain)[name]) and before


def test_bad_input_is_named():
    model = grouped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="rule must be one of quack, constant, got 'clip'"):
        QuacK(optimizer, model, IDS, rule="clip")
    with pytest.raises(ValueError, match="tau must be positive, got 0"):
        QuacK(optimizer, model, IDS, tau=0)
    adapted = get_peft_model(grouped(), LoraConfig(r=2, target_modules=["q_proj", "k_proj"]))
    some = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(ValueError, match="that the optimiser trains, got none"):
        QuacK(some, adapted.base_model.model, IDS)


def test_normed_queries_are_warned_about():
    model = tiny_models.build("qwen3")
    with pytest.warns(UserWarning, match="QuacK has no purpose there"):
        QuacK(torch.optim.SGD(model.parameters(), lr=0.1), model, IDS)
