"""Language models, and models of text with images or sound."""

import torch
from torch import Tensor

from support.recipes.recipe import Recipe
from support.samples import BATCH, LENGTH, normal, pixels, tokens

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
SECTIONED_ROPE = {**DEFAULT_ROPE, "mrope_section": [2, 1, 1]}
SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
DENSE_AND_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
LINEAR_HEADS = {"linear_head_dim": 8, "linear_num_heads": 4}
IMAGE_TOKEN = 98  # above every token of `tokens`
TINY_VQ = {
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
    "num_embeddings": 16,
}
INKLING_TEXT = {
    "unpadded_vocab_size": 90,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
}
TINY_SAM = {
    "output_channels": 16,
    "decoder_hidden_size": 32,
    "downsample_channels": [16, 16],
    "post_conv_in_channels": 16,
    "post_conv_mid_channels": 16,
    "post_conv_out_channels": 32,
}


def with_placeholders(count: int) -> Tensor:
    """Token ids of which the first ones stand for an image."""
    ids = tokens()
    ids[:, :count] = IMAGE_TOKEN
    return ids


def text_with_image(count: int, *extra: str):
    """An image that `count` tokens stand for; the tokens again under the names in `extra`."""

    def inputs(config):
        given = {"input_ids": with_placeholders(count), "pixel_values": pixels(config)}
        return {**given, **dict.fromkeys(extra, tokens())}

    return inputs


def shared_states(config) -> dict:
    """What the assistant of Gemma 4 takes over from the model it assists."""
    text = config.get_text_config()
    states = {}
    for kind in text.layer_types:
        part = text.per_layer_config[kind]
        shape = (BATCH, part.num_key_value_heads, LENGTH, part.head_dim)
        states[kind] = (normal(*shape), normal(*shape, seed=4))
    return {
        "inputs_embeds": normal(BATCH, 1, 2 * config.backbone_hidden_size),
        "shared_kv_states": states,
    }


RECIPES: dict[str, Recipe] = {
    # state-space and attention layers
    "bamba": Recipe({"attn_layer_indices": [1]}),
    "falcon_h1": Recipe({"mamba_d_ssm": 64}),
    "granitemoehybrid": Recipe({**LINEAR_AND_FULL, "shared_intermediate_size": 16}),
    "jamba": Recipe({"attn_layer_period": 2, "attn_layer_offset": 1}),
    "kimi_linear": Recipe(LINEAR_HEADS),
    "lfm2_moe": Recipe({"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "recurrent_gemma": Recipe({"block_types": ("recurrent", "attention")}),
    "zamba": Recipe(
        {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
    ),
    "zaya": Recipe(
        {
            "layer_types": ["hybrid", "hybrid_sliding"],
            "sliding_window": 8,
            "num_experts_per_tok": 1,
            "router_hidden_size": 16,
        }
    ),
    "qwen4_exp_text": Recipe(
        {
            "hc_lowrank": 16,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 8,
            "indexer_compress_ratio": 2,
        }
    ),
    "glm5_next_text": Recipe(
        {**LINEAR_HEADS, "qk_rope_head_dim": 0, "head_dim": 0, "index_kpool": 2}
    ),
    # layers of several kinds
    "cohere_compass_text": Recipe(
        {
            **SLIDING_AND_FULL,
            "rope_parameters": dict.fromkeys(SLIDING_AND_FULL["layer_types"], SECTIONED_ROPE),
        }
    ),
    "dory": Recipe(
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2,
            "n_input_layers": 1,
            "n_output_layers": 1,
        }
    ),
    "gemma3n_text": Recipe(
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": SLIDING_AND_FULL["layer_types"] * 2,
            "intermediate_size": [64] * 4,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
            "laurel_rank": 8,
        }
    ),
    "gemma4_assistant": Recipe(
        {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
        shared_states,
    ),
    "gemma4_unified_assistant": Recipe(inputs=shared_states),
    "diffusion_gemma": Recipe(
        {"canvas_length": 4},
        lambda _: {"input_ids": tokens(), "decoder_input_ids": tokens(length=4)},
    ),
    "neomme": Recipe({"head_dim": 16}),
    "step3p5": Recipe(
        {**SLIDING_AND_FULL, **DENSE_AND_SPARSE, "sliding_window": 8, "share_expert_dim": 16}
    ),
    "laguna": Recipe({**SLIDING_AND_FULL, "num_attention_heads_per_layer": [4, 8]}),
    # experts
    "flint": Recipe({"mlp_only_layers": [0]}),
    "nllb-moe": Recipe({"encoder_sparse_step": 2, "decoder_sparse_step": 2}),
    "switch_transformers": Recipe({"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}),
    "dbrx": Recipe({"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}}),
    "deepseek_ocr2_text": Recipe({**DENSE_AND_SPARSE, "num_experts_per_tok": 2}),
    "dots3_note_text": Recipe({"head_dim": 16}),
    "ernie4_5_vl_moe_text": Recipe(
        {
            "rope_parameters": {**DEFAULT_ROPE, "mrope_section": [1, 1, 2]},
            "moe_intermediate_size": [16, 8],
        }
    ),
    "mistral4": Recipe({"head_dim": 16}),
    "moshi": Recipe({"num_codebooks": 2}),
    "muse_spark_text": Recipe({"moe_hidden_size": 32}),
    # bytes, entities, languages
    "blt": Recipe(
        {"encoder_hash_byte_group_vocab": 50}, lambda _: {"input_ids": tokens(), "use_cache": False}
    ),
    "funnel": Recipe({"block_sizes": [1, 1]}),
    "luke": Recipe({"entity_vocab_size": 20, "entity_emb_size": 16}),
    "roc_bert": Recipe(
        {
            "pronunciation_embed_dim": 16,
            "pronunciation_vocab_size": 99,
            "shape_embed_dim": 16,
            "shape_vocab_size": 99,
        }
    ),
    "nemotron": Recipe({"num_key_value_heads": 2, "head_dim": 8}),
    "udop": Recipe(
        inputs=lambda config: {
            "input_ids": tokens(),
            "bbox": torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(BATCH, LENGTH, 4),
            "pixel_values": pixels(config),
            "decoder_input_ids": tokens(seed=4),
        }
    ),
    "xmod": Recipe({"default_language": "en_XX"}),
    # without attention, or with attention of their own
    "mamba2": Recipe({"num_heads": 8}),
    "perceiver": Recipe({"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2}),
    "reformer": Recipe(
        {
            "is_decoder": True,
            "attn_layers": ["local", "lsh"],
            "axial_pos_embds": False,
            "num_buckets": 2,
            "hash_seed": 0,
            "attention_head_size": 8,
            "feed_forward_size": 64,
            "local_attn_chunk_length": 4,
            "lsh_attn_chunk_length": 4,
        }
    ),
    "xlstm": Recipe({"hidden_size": 128}),
    # text and images
    "blip-2": Recipe({"image_token_index": IMAGE_TOKEN, "num_query_tokens": 4}, text_with_image(4)),
    "chameleon": Recipe({"vocabulary_map": {"<image>": IMAGE_TOKEN}, "vq_config": TINY_VQ}),
    **dict.fromkeys(
        ("deepseek_ocr2_sam_vision_model", "unlimited_ocr_sam_vision_model"), Recipe(TINY_SAM)
    ),
    "fast_vlm": Recipe({"vision_config": {"model_type": "clip_vision_model"}}),
    "florence2": Recipe(
        {
            "image_token_id": IMAGE_TOKEN,
            "vision_config": {
                "depths": [1, 1],
                "embed_dim": [16, 32],
                "num_heads": [2, 4],
                "num_groups": [2, 4],
                "patch_size": [7, 3],
                "patch_stride": [4, 2],
                "patch_padding": [3, 1],
                "patch_prenorm": [False, True],
                "window_size": 2,
                "projection_dim": 32,
            },
        },
        text_with_image(5, "decoder_input_ids"),
    ),
    "granite4_vision": Recipe(
        {
            "vision_config": {"hidden_size": 64},
            "qformer_config": {"num_hidden_layers": 1},
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[-1, 0]],
            "spatial_target_layers": [1],
        }
    ),
    "idefics": Recipe(
        {"alpha_initializer": "ones"},  # zeros would hide the cross attention
        lambda config: {
            "input_ids": tokens(),
            "pixel_values": pixels(config)[:, None],
            "image_attention_mask": torch.ones(BATCH, LENGTH, 1, dtype=torch.long),
        },
    ),
    "inkling_audio": Recipe({"n_mel_bins": 4, "mel_vocab_size": 16}),
    **dict.fromkeys(("inkling_text", "inkling2_text"), Recipe(INKLING_TEXT)),
    "inkling2_loop_text": Recipe(
        {
            **INKLING_TEXT,
            "num_hidden_layers": 4,
            "layer_types": ["hybrid_sliding"] * 2 + ["hybrid"] * 2,
            "n_layers_per_attn_res_block": 1,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 3,
            "loop_num_passes": 2,
            "loop_gate_rank": 4,
        }
    ),
    "instructblip": Recipe(
        {"image_token_index": IMAGE_TOKEN, "num_query_tokens": 4},
        text_with_image(4, "qformer_input_ids"),
    ),
    "instructblipvideo": Recipe(
        {"video_token_index": IMAGE_TOKEN, "num_query_tokens": 2},
        lambda config: {
            "input_ids": with_placeholders(4),
            "qformer_input_ids": tokens(),
            "pixel_values": pixels(config)[:, None].repeat(1, 2, 1, 1, 1),
        },
    ),
    "janus": Recipe(
        {
            "image_token_id": IMAGE_TOKEN,
            "vision_config": {"patch_size": 8, "projection_dim": 32},
            "vq_config": {**TINY_VQ, "projection_dim": 32, "image_token_embed_dim": 32},
        },
        text_with_image(4),
    ),
    "kosmos-2": Recipe(
        {"latent_query_num": 4},
        lambda config: {
            "input_ids": tokens(),
            "pixel_values": pixels(config),
            "image_embeds_position_mask": torch.arange(LENGTH).lt(4).expand(BATCH, LENGTH),
        },
    ),
    "mllama_text_model": Recipe(
        {"cross_attention_layers": [1]},
        lambda _: {"input_ids": tokens(), "cross_attention_states": normal(BATCH, 5, 32)},
    ),
    "molmo2": Recipe(
        {
            "vision_config": {"image_size": [16, 16]},
            "adapter_config": {"vision_feature_layer": [1, 0]},
            "text_config": {"additional_vocab_size": 8},
        }
    ),
    "paddleocr_vl_text": Recipe({"rope_parameters": SECTIONED_ROPE}),
    "perception_lm": Recipe(
        {"vision_config": {"model_type": "clip_vision_model", "model_args": {"embed_dim": 32}}}
    ),
    "pi0": Recipe(
        {"chunk_size": 4, "vlm_config": {"image_token_id": IMAGE_TOKEN, "projection_dim": 32}},
        lambda config: {
            "state": normal(BATCH, 32),
            "noise": normal(BATCH, 4, 32),
            "timestep": torch.tensor([0.3, 0.6]),
            "input_ids": with_placeholders(4),
            "pixel_values": pixels(config)[:, None],
            "pixel_attention_mask": torch.ones(BATCH, 1, dtype=torch.bool),
            "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long),
        },
    ),
    "pix2struct": Recipe(
        {"vision_config": {"patch_embed_hidden_size": 16, "seq_len": 16}},
        lambda config: {
            "flattened_patches": torch.cat([torch.ones(BATCH, 9, 2), normal(BATCH, 9, 16)], -1),
            "decoder_input_ids": tokens(),
        },
    ),
    "phi4_multimodal_audio": Recipe(
        {
            "num_blocks": 2,
            "nemo_conv_channels": 16,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
        }
    ),
    "pp_formulanet_vision": Recipe(TINY_SAM),
    "sam3_lite_text": Recipe(
        {"vision_config": {"fpn_hidden_size": 32}},
        lambda config: {"input_ids": tokens(), "pixel_values": pixels(config)},
    ),
    "sam3_lite_text_text_model": Recipe({"num_hidden_layers": 3}),
    **dict.fromkeys(
        ("got_ocr2", "pp_chart2table"), Recipe({"vision_config": {"output_channels": 16}})
    ),
    "cohere2_vision": Recipe({"alignment_intermediate_size": 64}),
    "deepseek_vl_hybrid": Recipe({"high_res_vision_config": {"output_channels": 16}}),
    # text and sound
    "apertus1p5": Recipe(
        {
            "image_token_offset": 99,
            "audio_token_offset": 107,
            "text_config": {"vocab_size": 115},
            "vision_config": {"codebook_size": 8, **TINY_VQ},
            "audio_config": {"codebook_size": 8, "codebook_dim": 32, "num_filters": 4},
        }
    ),
    "fun_asr_nano": Recipe({"adaptor_config": {"intermediate_size": 8}}),
    "kyutai_speech_to_text": Recipe(
        {
            "codebook_vocab_size": 99,
            "num_codebooks": 2,
            "audio_pad_token_id": 297,
            "codec_config": {"upsample_groups": 32},
        },
        lambda _: {"input_ids": tokens()[..., None].expand(-1, -1, 3)},
    ),
    **dict.fromkeys(
        ("musicgen_decoder", "musicgen_melody_decoder"),
        Recipe({"num_codebooks": 2}, lambda _: {"input_ids": tokens(2 * BATCH)}),
    ),
    "nemotron_h_omni": Recipe(
        {"vision_config": {"video_temporal_patch_size": 2, "max_img_size": 32}}
    ),
    "qwen3_omni_moe_audio_encoder": Recipe({"downsample_hidden_size": 16, "output_dim": 32}),
    "speech_to_text": Recipe({"conv_channels": 16, "input_feat_per_channel": 16}),
    "voxtral_realtime": Recipe(
        inputs=lambda _: {
            "input_ids": tokens(),
            "input_features": normal(BATCH, 16, 8 * LENGTH),
            "num_delay_tokens": 6,
        }
    ),
    "voxtral_realtime_text": Recipe(
        inputs=lambda _: {"input_ids": tokens(), "t_cond": normal(1, 1, 32)}
    ),
}
