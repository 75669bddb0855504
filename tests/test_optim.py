"""QuacK and QK-clip: every head by hand, in any layout and split, and nothing else touched."""

import copy
import json
from pathlib import Path

import optim_worker
import pytest
import releases
import tiny_models
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from gloo import rows_of
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Qwen2Config,
)

import hf_sigmoid
from hf_sigmoid.logit_control.heads import standing_in
from hf_sigmoid.logit_control.monitor import record
from hf_sigmoid.optim import QKClip, QuacK, find_heads

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
RECIPES = Path(__file__).parents[1] / "recipes"
WORKER = Path(optim_worker.__file__)
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
    control = QuacK(optimizer, find_heads(model, IDS), tau=tau)
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
    QuacK(optimizer, find_heads(model, IDS), tau=0.1)
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
    QuacK(optimizer, find_heads(model, IDS), tau=tau)
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


def latent():
    return DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=8, v_head_dim=6,
        qk_rope_head_dim=4, qk_nope_head_dim=10, first_k_dense_replace=2,
    )  # fmt: skip


def test_latent_attention_follows_its_six_factors():
    model = build(latent())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    control = QuacK(optimizer, find_heads(model, IDS), tau=0.5)
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
    control = QuacK(optimizer, find_heads(model, IDS))
    for seed in range(3):
        step(model, optimizer, seed)
    saved = control.state_dict()
    again = grouped()
    again.load_state_dict(model.state_dict())
    fresh = QuacK(torch.optim.AdamW(again.parameters(), lr=0.05), find_heads(again, IDS))
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
    control = QuacK(optimizer, find_heads(model, IDS), tau=0.1, rule="constant")
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
        QuacK(optimizer, find_heads(model, IDS), rule="clip")
    with pytest.raises(ValueError, match="tau must be positive, got 0"):
        QuacK(optimizer, find_heads(model, IDS), tau=0)
    adapted = get_peft_model(grouped(), LoraConfig(r=2, target_modules=["q_proj", "k_proj"]))
    some = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(ValueError, match="that the optimiser trains, got none"):
        QuacK(some, find_heads(adapted.base_model.model, IDS))


def test_a_head_of_zeros_is_named_before_the_first_step():
    model = grouped()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[DIM:] = 0
    with pytest.raises(ValueError, match="weights other than zero in every head"):
        QuacK(torch.optim.SGD(model.parameters(), lr=0.1), find_heads(model, IDS))


def test_accelerates_optimizer_is_scaled_as_its_own():
    Accelerator(cpu=True)
    rates = []
    for wrap in (lambda optimizer: optimizer, AcceleratedOptimizer):
        model = grouped()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        QuacK(optimizer, find_heads(model, IDS), tau=0.3)
        step(model, optimizer)
        rates.append(weights(model))
    AcceleratorState._reset_state(reset_partial_state=True)
    assert all(torch.equal(rates[0][name], rates[1][name]) for name in rates[0])


def test_projections_of_one_kind_and_fused_ones_are_told_apart():
    heads = find_heads(grouped(), IDS)
    for kind in ("query", "key"):
        assert heads.projections[kind] == [
            f"model.layers.{n}.self_attn.{kind[0]}_proj.weight" for n in range(2)
        ]
    assert heads.fused == []
    for layout in list(LAYOUTS)[:2]:
        config, name, _ = LAYOUTS[layout]
        heads = find_heads(build(config), IDS)
        assert heads.projections == {"query": [], "key": []}
        assert len(heads.fused) == 2 and all(f"{name}.weight" in each for each in heads.fused)
    heads = find_heads(build(latent()), IDS)
    name = "model.layers.0.self_attn."
    assert [n for n in heads.projections["query"] if name in n] == [
        f"{name}q_b_proj.weight", f"{name}q_a_proj.weight",
    ]  # fmt: skip
    assert [n for n in heads.fused if name in n] == [
        f"{name}kv_a_proj_with_mqa.weight", f"{name}kv_b_proj.weight",
    ]  # fmt: skip


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "ssmax"])
@pytest.mark.parametrize("layout", ["fused, head by head", "fused, transposed", "with biases"])
def test_a_twin_without_memory_has_the_same_heads(layout, function):
    config = copy.deepcopy(LAYOUTS[layout][0])
    name = None if function == "softmax" else function
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name)
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(model.config)
    found = find_heads(twin, IDS)
    assert all(parameter.is_meta for parameter in twin.parameters())
    bound, expected = found.bind(model), find_heads(model, IDS)
    assert bound.model is model and bound.blocks.keys() == expected.blocks.keys()
    for name, block in expected.blocks.items():
        for key, matrix in block.items():
            other = bound.blocks[name][key]
            assert other.projection is matrix.projection and other.name == matrix.name
            assert torch.equal(other.head, matrix.head) and other.heads == matrix.heads


def test_heads_are_bound_by_name_through_wrappers_and_not_to_another_size():
    heads = find_heads(grouped(), IDS)
    adapted = get_peft_model(grouped(), LoraConfig(r=2, target_modules=["q_proj"]))
    bound = heads.bind(torch.compile(adapted))
    layer = adapted.base_model.model.model.layers[0].self_attn
    block = bound.blocks["model.layers.0.self_attn"]
    assert block["query"].projection is layer.q_proj.base_layer
    assert block["key"].projection is layer.k_proj
    with pytest.raises(ValueError, match=r"q_proj: expected 32 output features, got 16"):
        heads.bind(build(LlamaConfig(**{**SIZES, "hidden_size": 16})))
    with pytest.raises(ValueError, match="got no such projection"):
        heads.bind(build(LAYOUTS["fused, transposed"][0]))


def products(model, name):
    """τ q·k `[H, T, T]` of one attention module, as transformers computes them."""
    seen = []

    def attention(module, query, key, value, mask, scaling=None, **kwargs):
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        seen.append((module, (query @ key.mT)[0] * scaling))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    mask = torch.ones(1, 1, IDS.shape[1], IDS.shape[1], dtype=torch.bool)
    with torch.no_grad(), standing_in([model.config], attention):
        model(IDS, attention_mask=mask, use_cache=False)
    return {module: z for module, z in seen}[model.get_submodule(name)]


# Of T = 10: two heads above it in one group, one of two in the other, and none at all.
SEEN = torch.tensor([40.0, 20.0, 16.0, 3.0])
GAMMA = torch.tensor([0.25, 0.5, 0.625, 1.0])
CLIPPED = {
    "one key head each": LlamaConfig(**SIZES, attention_bias=True),
    "grouped": LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True),
    "fused": GPTNeoXConfig(**SIZES),
    "transposed": LAYOUTS["fused, transposed"][0],
    "latent": latent(),
}


@pytest.mark.parametrize("layout", CLIPPED)
def test_every_heads_products_shrink_by_its_own_gamma(layout):
    model = build(CLIPPED[layout])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # biases are not zero
    heads = find_heads(model, IDS)
    name = next(iter(heads.blocks))
    before = {each: products(model, each) for each in heads.blocks}
    start = weights(model)
    assert QKClip(heads, threshold=10.0, alpha=0.3).clip({name: SEEN}) == 3
    # The second module's input has changed, so the first's products are compared and the second's
    # weights.
    torch.testing.assert_close(
        products(model, name), GAMMA[:, None, None] * before[name], atol=1e-5, rtol=1e-4
    )
    after = weights(model)
    assert all(torch.equal(after[n], start[n]) for n in after if f"{name}." not in n)
    for each, weight in after.items():
        assert (weight.abs() <= start[each].abs()).all()  # none grows


def test_shares_of_gamma_are_those_of_the_rule():
    """γ^α and γ^(1−α) of one key head each; a shared one shrinks as little as its group needs."""
    for groups, of_key in ((4, GAMMA**0.7), (2, torch.tensor([0.5, 1.0]) ** 0.7)):
        model = build(LlamaConfig(**SIZES, num_key_value_heads=groups))
        layer = model.model.layers[1].self_attn
        start = weights(layer)
        heads = find_heads(model, IDS)
        QKClip(heads, threshold=10.0, alpha=0.3).clip({"model.layers.1.self_attn": SEEN})
        of_query = GAMMA / of_key.repeat_interleave(4 // groups)
        if groups == 4:
            torch.testing.assert_close(of_query, GAMMA**0.3)
        for kind, factor in (("q", of_query), ("k", of_key)):
            name = f"{kind}_proj.weight"
            expected = start[name] * factor.repeat_interleave(DIM)[:, None]
            torch.testing.assert_close(weights(layer)[name], expected)


def test_heads_that_are_not_above_the_threshold_are_left_alone():
    model = grouped()
    heads = find_heads(model, IDS)
    control, before = QKClip(heads, threshold=10.0), weights(model)
    quiet = torch.tensor([-5.0, -torch.inf, torch.nan, torch.inf])
    assert control.clip(dict.fromkeys(heads.blocks, quiet)) == 0
    assert control.clip({"model.layers.0.self_attn": torch.tensor([0.0, 10.0, 1.0, 2.0])}) == 0
    assert all(torch.equal(before[name], each) for name, each in weights(model).items())


def test_what_was_recorded_is_clipped_to_the_threshold():
    model = grouped()
    hf_sigmoid.configure(model, "ssmax")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(20)
            layer.self_attn.log_length.offset.fill_(0.5)

    def seen():
        with record(model) as recorder, torch.no_grad():
            model(IDS, use_cache=False)
        return recorder.max_logits()

    first = "model.layers.0.self_attn"
    before = seen()
    threshold = before[first].median().item()
    assert QKClip(find_heads(model, IDS), threshold=threshold).clip(before) >= 2
    torch.testing.assert_close(seen()[first], before[first].clamp(max=threshold))


def test_bad_clips_are_named():
    heads = find_heads(grouped(), IDS)
    with pytest.raises(ValueError, match="threshold must be positive, got 0"):
        QKClip(heads, threshold=0)
    with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\], got 2"):
        QKClip(heads, alpha=2)
    control = QKClip(heads)
    with pytest.raises(ValueError, match=r"model\.layers\.9: expected an attention module of"):
        control.clip({"model.layers.9": torch.ones(4)})
    with pytest.raises(ValueError, match=r"expected \[4\] logits, got \[2\]"):
        control.clip({"model.layers.0.self_attn": torch.ones(2)})
    with pytest.warns(UserWarning, match="logit control has no purpose there"):
        heads = find_heads(tiny_models.build("qwen3"), IDS)
    with pytest.raises(ValueError, match="norms its queries or keys"):
        QKClip(heads)


def test_the_stability_sweep_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(RECIPES)
    import stability

    command = ["--quick", "--jobs", "1", "--out", str(tmp_path)]
    stability.main(command)
    file = tmp_path / "stability.jsonl"
    rows = {(row["method"], row["lr"]): row for row in map(json.loads, file.open())}
    assert len(rows) == 8 and {method for method, _ in rows} == set(stability.METHODS)
    slow, fast = stability.RATES[2], stability.RATES[-1]
    for method in stability.METHODS:
        assert rows[method, slow]["loss"] < rows[method, slow]["first"] - 1
        assert stability.failed(rows[method, fast])
    tops = {method: rows[method, fast]["max_logit"] for method in stability.METHODS}
    assert tops["constant"] < tops["default"] and tops["qk-norm"] < tops["default"]
    table = (tmp_path / "stability.md").read_text()
    assert f"| {rows['quack', slow]['max_logit']:.3g} |" in table and "1 of 1 failed" in table
    picture = tmp_path / "stability.png"
    assert picture.stat().st_size > 10_000

    picture.unlink()
    whole = file.read_text().splitlines(keepends=True)
    file.write_text("".join(whole[:-1]) + whole[-1][:30])  # killed while it wrote
    made = []
    monkeypatch.setattr(stability, "train", lambda run: made.append(run) or json.loads(whole[-1]))
    stability.main(command)
    assert len(made) == 1 and len(stability.load(file)) == 8 and picture.exists()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> dict[str, dict]:
    return rows_of(WORKER, tmp_path_factory.mktemp("split"), "optim")


WAYS = (
    "ddp", "fsdp2", "fsdp2_straddling", "fsdp2_uneven", "fsdp2_columns", "mesh_1_2", "mesh_2_1",
    "transformers_fsdp2", "transformers_tp",
)  # fmt: skip


@pytest.mark.parametrize("way", releases.marked(WAYS, optim_worker.SINCE["optim"]))
def test_split_weights_move_as_whole_ones(two_processes, way):
    found = two_processes[way]
    assert found["difference"] < 1e-12  # of float64: weights, rates and saved state
    assert found["spread"] > 1e-3  # heads have rates of their own
    assert found["clipped"][0] == found["clipped"][1] > 2


@pytest.mark.parametrize("way", ["fsdp2", "transformers_tp"])
def test_heads_are_not_sought_in_split_weights(two_processes, way):
    said = two_processes[f"refused_{way}"]["message"]
    assert "expected whole weights, got sharded ones" in said


def test_normed_queries_are_warned_about():
    model = tiny_models.build("qwen3")
    with pytest.warns(UserWarning, match="logit control has no purpose there"):
        find_heads(model, IDS)
