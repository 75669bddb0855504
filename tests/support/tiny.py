"""A small config of any model type: one table of sizes, and what single types need besides."""

import contextlib

from transformers.configuration_utils import PreTrainedConfig

from support.catalogue import config_class, model_class

WIDTH, HEADS, GROUPS, HEAD_DIM, VOCABULARY = 32, 4, 2, 8, 99

SIZES: dict = {
    # widths
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim",
         "embedding_size", "text_embed_dim", "n_state", "output_hidden_size",
         "out_hidden_size", "text_hidden_size", "adapter_out_dim", "projector_hidden_size",
         "vision_hidden_size", "backbone_hidden_size", "hidden_size_global"), WIDTH),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim",
         "hidden_dim", "d_inner", "dff", "dim_ff", "intermediate_size_mlp", "ffn_hidden_size",
         "mlp_dim"), 64),
    **dict.fromkeys(("classifier_proj_size", "projection_dim"), 16),
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    # depths
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers",
         "decoder_layers", "num_decoder_layers", "encoder_num_hidden_layers", "depth",
         "decoder_num_hidden_layers", "num_encoder_layers", "depths_total"), 2),
    "layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    # heads
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
         "decoder_attention_heads", "encoder_num_attention_heads", "decoder_num_attention_heads",
         "n_audio_head", "attention_heads"), HEADS),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "encoder_num_key_value_heads",
         "decoder_num_key_value_heads"), GROUPS),
    **dict.fromkeys(
        ("head_dim", "d_kv", "d_head", "kv_channels", "query_pre_attn_scalar"), HEAD_DIM),
    # multi-head latent attention
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "qk_head_dim": 16,
    "index_head_dim": 8, "index_n_heads": 2, "index_topk": 8, "rotary_dim": 4,
    # lengths and windows
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(
        ("sliding_window", "attention_window", "local_attention", "attention_chunk_size"), 8),
    "global_attn_every_n_layers": 2,
    # special tokens and labels
    "num_labels": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "sep_token_id": 2, "cls_token_id": 1, "type_vocab_size": 2,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
         "moe_shared_expert_intermediate_size"), 16),
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    # images and audio
    "image_size": 16, "patch_size": 4, "num_mel_bins": 16, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "conv_dim": (16, 16), "conv_stride": (5, 4),
    "conv_kernel": (10, 8), "num_feat_extract_layers": 2, "num_conv_layers": 2,
    "feat_extract_norm": "layer",
    # state-space layers
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8,
}  # fmt: skip
# Absent on purpose where the default is None.
OPTIONAL = {
    "sliding_window", "attention_chunk_size", "q_lora_rank", "num_key_value_heads", "num_kv_heads",
    "encoder_num_key_value_heads", "decoder_num_key_value_heads", "n_inner", "embedding_size",
}  # fmt: skip
DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")


def tiny(model_type: str, **extra) -> PreTrainedConfig:
    """A small config of this model type; `extra` overrides any field."""
    cls, takes = config_class(model_type), model_class(model_type).config_class
    if takes is not None and not issubclass(cls, takes):
        cls = takes  # the language model of a larger one
    return shrink(cls, {**_recipe(model_type), **extra})


def shrink(cls: type[PreTrainedConfig], extra: dict | None = None, depth: int = 0):
    """A part takes the recipe of its own type besides; of its fields, a dict overrides some."""
    extra = {**_recipe(cls.model_type), **(extra or {})}
    base = _default(cls, extra)
    fields = _sizes(base)
    _layers(base, fields)
    _rope(base, fields)
    for name in (cls.sub_configs or {}) if depth <= 3 else ():
        current, inner = getattr(base, name, None), extra.get(name)
        if isinstance(inner, PreTrainedConfig) or not isinstance(current, PreTrainedConfig):
            continue
        if isinstance(extra.pop(name, None), dict):
            part = config_class(inner["model_type"]) if "model_type" in inner else type(current)
            fields[name] = shrink(part, {**_switches(cls, name), **inner}, depth + 1)
        else:
            with contextlib.suppress(Exception):  # a part that refuses keeps its full size
                fields[name] = shrink(type(current), _switches(cls, name), depth + 1)
    return cls(**{**fields, **extra})


def _switches(cls: type[PreTrainedConfig], part: str) -> dict:
    """What the whole turns on or off in a part of it."""
    spec = (getattr(cls, "sub_configs_defaults", None) or {}).get(part)
    given = getattr(spec, "init_kwargs", None) or {}
    return {name: value for name, value in given.items() if isinstance(value, bool)}


def _default(cls: type[PreTrainedConfig], extra: dict) -> PreTrainedConfig:
    try:
        base = cls()
    except Exception:  # some parts do not fit together unless they are changed
        base = cls(**{name: value for name, value in extra.items() if name in cls.sub_configs})
    base.allow_global_per_layer_attribute_access = True
    return base


def _sizes(base: PreTrainedConfig) -> dict:
    """What the table has for the fields of this config."""
    fields: dict = {}
    aliases = getattr(base, "attribute_map", None) or {}
    for name, value in SIZES.items():
        if not hasattr(base, name) or (aliases.get(name, name) != name and aliases[name] in SIZES):
            continue
        current = getattr(base, name)
        if isinstance(attribute := getattr(type(base), name, None), property):
            try:
                attribute.__set__(base, current)
            except (AttributeError, NotImplementedError):
                continue
        if current is None and name in OPTIONAL:
            continue
        if isinstance(current, (list, tuple)) == isinstance(value, (list, tuple)):
            fields[name] = value
    # An original with one group per head stays so.
    heads = getattr(base, "num_attention_heads", None)
    groups = getattr(base, "num_key_value_heads", None)
    if "num_key_value_heads" in fields and (heads == groups or hasattr(base, "kv_lora_rank")):
        fields["num_key_value_heads"] = HEADS
    return fields


def _recipe(model_type: str) -> dict:
    from support.recipes import RECIPES

    recipe = RECIPES.get(model_type)
    return recipe.config if recipe else {}


def _layers(base: PreTrainedConfig, fields: dict) -> None:
    """The first layer of each kind, at least two, and every list by layer cut to these."""
    depths = {name: getattr(base, name, None) for name in DEPTHS}
    count = next((depth for depth in depths.values() if isinstance(depth, int)), None)
    if not count:
        return
    written = base.to_dict()
    values = {name: getattr(base, name, None) for name in written}
    lists = {name: value for name, value in values.items() if _by_layer(value, count)}
    kinds = [value for value in lists.values() if all(isinstance(each, str) for each in value)]
    if _by_layer(derived := getattr(base, "layer_types", None), count):
        kinds.append(derived)
    chosen = sorted({value.index(kind) for value in kinds for kind in set(value)})
    if len(chosen) < 2:
        chosen = [0, count - 1] if count > 1 else [0]
    for name, depth in depths.items():
        if depth == count and name in fields:
            fields[name] = len(chosen)
    for name, value in lists.items():
        if count > 3 and not isinstance(getattr(type(base), name, None), property):
            fields[name] = [value[index] for index in chosen]
    if isinstance(overrides := written.get("per_layer_config"), dict):
        by_layer = {int(index): changed for index, changed in overrides.items()}
        sizes = {**SIZES, **fields, "head_dim": 2 * HEAD_DIM}  # heads wider than in other layers
        fields["per_layer_config"] = {
            new: {
                name: sizes.get(name, value) if value else value
                for name, value in by_layer[old].items()
            }
            for new, old in enumerate(chosen)
            if old in by_layer
        }


def _by_layer(value, count: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == count


def _rope(base: PreTrainedConfig, fields: dict) -> None:
    """Sections of a rotary embedding (time, height, width) that fit the small head."""
    rope = getattr(base, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_type" not in rope:
        return
    sections = "mrope_section" in (getattr(base, "ignore_keys_at_rope_validation", None) or ())
    if sections or "mrope_section" in rope:
        half = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
        rope = {**rope, "mrope_section": [half - 2 * (half // 4), half // 4, half // 4]}
    fields["rope_parameters"] = rope
