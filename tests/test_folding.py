"""Gains and temperatures folded into projections: what they compute, and that they come out."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from hf_sigmoid import masks, parameters
from hf_sigmoid.attention import attention
from hf_sigmoid.conversions import folding

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**GROUPED),
    "with biases": Qwen2Config(**GROUPED),
    "fused, head by head": GPTNeoXConfig(**SIZES),
    "fused, q then k then v": Phi3Config(**GROUPED),
    "fused, transposed": GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2
    ),
    "scaled before": OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
    "latent": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=8, v_head_dim=6,
        qk_rope_head_dim=4, qk_nope_head_dim=8, first_k_dense_replace=2,
    ),
}  # fmt: skip
NORMED = {
    "a norm a head": Qwen3Config(**GROUPED, head_dim=8),
    "a norm a head, sliding": Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=4),
}
IDS = torch.arange(3, 10)[None]


def build(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def random_factors(model, kinds=folding.KINDS) -> dict[str, torch.Tensor]:
    """Also negative ones: training may take them there."""
    generator = torch.Generator().manual_seed(1)
    sign = torch.tensor([1.0, -1.0, 1.0, 1.0])
    return {
        f"{kind}/{name}": sign * (0.5 + torch.rand(len(sign), generator=generator))
        for name, module in parameters.attention_modules(model)
        for kind in kinds
    }


@torch.no_grad()
def scaled_logits(model, factors) -> torch.Tensor:
    """Softmax attention of t·q, times g, by hand in the attention function itself."""
    names = {module: name for name, module in model.named_modules()}
    one = torch.ones(1)

    def scaled(module, query, key, value, mask, **kwargs):
        temperature = factors.get(f"temperature/{names[module]}", one).view(1, -1, 1, 1)
        gain = factors.get(f"gain/{names[module]}", one).view(1, 1, -1, 1)
        output, _ = attention("softmax", module, query * temperature, key, value, mask, **kwargs)
        return output * gain, None

    AttentionInterface.register("test_scaled", scaled)
    AttentionMaskInterface.register("test_scaled", masks.interval_mask)
    try:
        model.config._attn_implementation_internal = "test_scaled"
        return model(IDS, use_cache=False).logits
    finally:
        model.config._attn_implementation_internal = "sdpa"
        AttentionInterface._global_mapping.pop("test_scaled")
        AttentionMaskInterface._global_mapping.pop("test_scaled")


@pytest.mark.parametrize("kind", CONFIGS)
def test_folded_factors_compute_what_scaled_attention_does_and_come_out_bit_for_bit(kind):
    model = build(CONFIGS[kind])
    before = {name: t.clone() for name, t in model.state_dict().items()}
    factors = random_factors(model)
    expected = scaled_logits(model, factors)
    places = folding.find_places(model, IDS)
    folded = folding.fold(model, places, factors)
    with torch.no_grad():
        found = model(IDS, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert any(not torch.equal(t, before[name]) for name, t in model.state_dict().items())
    folding.restore(model, folded)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("kind", NORMED)
def test_a_norm_after_the_projection_leaves_no_place_for_a_temperature(kind):
    model = build(NORMED[kind])
    places = folding.find_places(model, IDS)
    assert all(each.temperature is None and each.gain is not None for each in places.values())
    factors = random_factors(model, ("gain",))
    expected = scaled_logits(model, factors)
    folding.fold(model, places, factors)
    with torch.no_grad():
        found = model(IDS, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="no projection that a temperature"):
        folding.fold(model, places, random_factors(model, ("temperature",)))


def test_a_projection_in_another_module_is_not_a_place():
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**{**SIZES, "max_position_embeddings": 32})).eval()
    for each in folding.find_places(model, IDS).values():
        assert each.gain is None and each.temperature is not None


def test_finding_places_leaves_the_model_as_it_was():
    model = build(CONFIGS["llama"]).train()
    before = model(IDS).logits
    folding.find_places(model, IDS)
    assert torch.equal(model(IDS).logits, before)
    assert model.training and all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_division_is_near_and_keeps_what_was_trained_since():
    model = build(CONFIGS["with biases"])
    before = {name: t.clone() for name, t in model.state_dict().items()}
    places = folding.find_places(model, IDS)
    folded = folding.fold(model, places, random_factors(model), keep_originals=False)
    assert not folded.originals
    folding.unfold(model, places, folded)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], atol=0, rtol=1e-6)


def test_a_file_holds_all_of_it(tmp_path):
    model = build(CONFIGS["llama"])
    places = folding.find_places(model, IDS)
    assert folding.Folded.load(tmp_path) is None
    first = folding.fold(model, places, random_factors(model))
    second = folding.fold(model, places, random_factors(model, ("gain",)))
    both = first.and_then(second, keep_originals=True)
    build(CONFIGS["llama"]).save_pretrained(tmp_path / "source")
    both.save(tmp_path, model, tmp_path / "source")
    loaded = folding.Folded.load(tmp_path)
    assert loaded.factors.keys() == both.factors.keys()
    assert loaded.untouched(model) and not loaded.untouched(build(CONFIGS["llama"]))
    name = "gain/model.layers.0.self_attn"
    torch.testing.assert_close(loaded.factors[name], first.factors[name] * second.factors[name])
    # The tensors before the first, not those between the two.
    fresh = build(CONFIGS["llama"]).state_dict()
    assert loaded.originals and all(torch.equal(t, fresh[n]) for n, t in loaded.originals.items())
    with pytest.raises(ValueError, match="of another model"):
        folding.restore(build(CONFIGS["fused, transposed"]), loaded)
    (tmp_path / folding.FILE).write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match="cannot be read"):
        folding.Folded.load(tmp_path)


def test_ones_change_nothing_and_bad_factors_are_refused():
    model = build(CONFIGS["llama"])
    places = folding.find_places(model, IDS)
    ones = {name: torch.ones_like(t) for name, t in random_factors(model).items()}
    folded = folding.fold(model, places, ones)
    assert not folded.factors and not folded.originals
    for bad in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="finite and not 0"):
            folding.fold(model, places, {"gain/model.layers.0.self_attn": torch.full((4,), bad)})


def test_bfloat16_weights_are_folded_and_restored():
    model = build(CONFIGS["llama"]).bfloat16()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    places = folding.find_places(model, IDS)
    assert all(each.gain and each.temperature for each in places.values())
    folded = folding.fold(model, places, random_factors(model))
    folding.restore(model, folded)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
