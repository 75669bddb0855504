"""Models of images, video, sound and time series."""

import importlib

import torch
from torch import Tensor

from support.recipes.recipe import Recipe
from support.samples import BATCH, GRID, LENGTH, normal, patches, pixels, tokens

# Towers that take patches and the grid that they make up.
TOWER = {"out_hidden_size": 32}
LEARNED = {**TOWER, "num_position_embeddings": 64}
DEEPSTACK = {**LEARNED, "deepstack_visual_indexes": [0, 1]}
WINDOWED = {**TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
HUNYUAN = {**TOWER, "max_image_size": 64}
MUSE = {"pos_emb_height": 8, "pos_emb_width": 8}
NAVIT = Recipe(
    {"insert_layer_id": 0},
    lambda config: {
        "pixel_values": normal(1, 3, 4, 4 * 48), "target_sizes": GRID[:, 1:].int(),
    },
)  # fmt: skip

TOWERS = {
    "cohere_compass_vision": Recipe(DEEPSTACK),
    "exaone4_5_vision": Recipe(WINDOWED),
    "gemma4_vision": Recipe(
        {"position_embedding_size": 64},
        lambda config: {
            "pixel_values": normal(BATCH, 36, 48),
            "pixel_position_ids": torch.cartesian_prod(*[torch.arange(6)] * 2).expand(BATCH, 36, 2),
        },
    ),
    "glm4v_moe_vision": Recipe(TOWER),
    "glm4v_vision": Recipe(TOWER),
    "glm5_next_vision": Recipe({**TOWER, "projection_intermediate_size": 64}),
    "glm_ocr_vision": Recipe(TOWER),
    "hunyuan_vl_vision": Recipe({**HUNYUAN, "text_hidden_size": 32}),
    "hy_v4_vl_vision": Recipe(HUNYUAN),
    "inkling2_vision": Recipe(
        {"posemb_grid_size": 8, "projection_hidden_dim": 64, "text_hidden_size": 32},
        lambda config: {"pixel_values": patches(config, GRID, 8, 8, 3), "image_grid_thw": GRID},
    ),
    "kimi_k25_vision": Recipe(
        MUSE,
        lambda config: {"pixel_values": patches(config, GRID, 3, 4, 4), "grid_thw": GRID},
    ),
    "minicpm_ocr_vision": NAVIT,
    "minicpmv4_7_vision": NAVIT,
    "muse_glimmer_vision": Recipe(MUSE),
    "muse_spark_vision": Recipe(MUSE),
    "qwen2_5_vl_vision": Recipe(WINDOWED),
    "qwen3_5_moe_vision": Recipe(LEARNED),
    "qwen3_5_vision": Recipe(LEARNED),
    "qwen3_vl_moe_vision": Recipe(DEEPSTACK),
    "qwen3_vl_vision": Recipe(DEEPSTACK),
    "qwen4_exp_vision": Recipe(LEARNED),
    "video_llama_3_vision": Recipe(
        inputs=lambda config: {
            "pixel_values": patches(config, GRID), "grid_thw": GRID,
            "merge_sizes": torch.tensor([2, 2]),
        }
    ),
}  # fmt: skip


# Text beside images, sound or the boxes of a document.
PICTURE = 98  # the token in whose places parts of an image go
BRIDGE = {"hidden_size": 128, "num_attention_heads": 2}
EFFICIENT = {
    "kernel_sizes": [3, 3], "in_channels": [32, 8], "out_channels": [8, 16], "strides": [1, 2],
    "num_block_repeats": [1, 1], "expand_ratios": [1, 2], "width_coefficient": 1.0,
    "depth_coefficient": 1.0, "hidden_dim": 32, "num_hidden_layers": 2,
}  # fmt: skip


def pair(config) -> dict:
    return {"input_ids": tokens(), "pixel_values": pixels(config)}


def pictured(count: int) -> Tensor:
    """Text after the places of so many parts of an image."""
    return torch.cat([torch.full((BATCH, count), PICTURE), tokens()], dim=1)


def spots(config) -> dict:
    """Flat patches of two images of different shapes, the second one padded."""
    visible = torch.arange(16) < torch.tensor([16, 8])[:, None]
    return {
        "pixel_values": normal(BATCH, 16, 48),
        "pixel_attention_mask": visible.int(),
        "spatial_shapes": torch.tensor([[4, 4], [2, 4]]),
    }


PAIRS = {
    "aimv2": Recipe(inputs=pair),
    "align": Recipe({"vision_config": EFFICIENT}),
    "blip_2_qformer": Recipe(
        {"encoder_hidden_size": 32},
        lambda config: {
            "query_embeds": normal(BATCH, 4, 32),
            "encoder_hidden_states": normal(BATCH, LENGTH, 32),
        },
    ),
    "bridgetower": Recipe(
        {**BRIDGE, "text_config": BRIDGE, "vision_config": BRIDGE},
        lambda config: {**pair(config), "pixel_mask": torch.ones(BATCH, 16, 16).long()},
    ),
    "bros": Recipe({"hidden_size": 64}),
    "clap": Recipe(
        {
            "audio_config": {
                "patch_embeds_hidden_size": 16, "hidden_size": 32, "depths": [2, 1],
                "num_attention_heads": [2, 4], "window_size": 2, "spec_size": 32,
            }
        },
        lambda config: {
            "input_ids": tokens(), "input_features": normal(BATCH, 1, 64, 16),
            "is_longer": torch.zeros(BATCH, 1).bool(),
        },
    ),
    "clvp": Recipe(
        {
            part: {**BRIDGE, "projection_dim": 128, "vocab_size": 256}
            for part in ("text_config", "speech_config")
        },
        lambda config: {"input_ids": tokens(), "input_features": normal(BATCH, 80, 16)}
    ),
    "colqwen2": Recipe(
        {"vlm_config": {"image_token_id": PICTURE, "vision_config": {}, "text_config": {}}},
        lambda config: {
            "input_ids": pictured(4), "pixel_values": normal(BATCH, 16, 96),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
        },
    ),
    "layoutlmv3": Recipe({"coordinate_size": 4, "shape_size": 8, "input_size": 16}),
    "lilt": Recipe({"hidden_size": 48}),
    "lxmert": Recipe(
        {"l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 16},
        lambda config: {
            "input_ids": tokens(), "visual_feats": normal(BATCH, 5, 16),
            "visual_pos": normal(BATCH, 5, 4),
        },
    ),
    "siglip2": Recipe(inputs=spots),
    "siglip2_vision_model": Recipe({"num_patches": 16}, spots),
    "t5gemma2_encoder": Recipe(
        {
            "text_config": {"dropout_rate": 0.0}, "mm_tokens_per_image": 4,
            "image_token_index": PICTURE,
        },
        lambda config: {"input_ids": pictured(4), "pixel_values": pixels(config)},
    ),
    "vilt": Recipe(  # it would draw which patches of an image it looks at
        inputs=lambda config: {
            "input_ids": tokens(), "image_embeds": normal(BATCH, 16, 32),
            "pixel_mask": torch.ones(BATCH, 16).long(),
        }
    ),
    "xclip": Recipe(
        {
            "prompt_num_attention_heads": 4,
            "vision_config": {
                "mit_hidden_size": 16, "mit_intermediate_size": 32, "mit_num_attention_heads": 2,
                "num_frames": 4,
            },
        },
        lambda config: {"input_ids": tokens(), "pixel_values": pixels(config, 4)},
    ),
}  # fmt: skip

# Videos.
VIDEOS = {
    "videoprism": Recipe(
        inputs=lambda config: {"input_ids": tokens(), "pixel_values_videos": pixels(config, 2)}
    ),
    "videoprism_vision_model": Recipe(
        {
            "tubelet_size": [1, 4, 4], "num_frames": 2, "num_spatial_layers": 2,
            "num_temporal_layers": 2,
        }
    ),
    "vjepa2": Recipe(
        {
            "crop_size": 16, "frames_per_clip": 4, "pred_hidden_size": 32,
            "pred_num_attention_heads": 4, "pred_num_hidden_layers": 2,
        }
    ),
}  # fmt: skip

# Time series.
AHEAD = {"prediction_length": 4, "context_length": 12, "label_length": 4, "moving_average": 5}
FORECAST = {"context_length": 64, "patch_length": 8, "horizon_length": 8}
SERIES = {
    "autoformer": Recipe(AHEAD),
    "decision_transformer": Recipe(
        {"max_ep_len": 32},
        lambda config: {
            "states": normal(BATCH, LENGTH, 17), "actions": normal(BATCH, LENGTH, 4),
            "rewards": normal(BATCH, LENGTH, 1), "returns_to_go": normal(BATCH, LENGTH, 1),
            "timesteps": torch.arange(LENGTH).expand(BATCH, LENGTH),
            "attention_mask": torch.ones(BATCH, LENGTH),
        },
    ),
    "informer": Recipe({name: AHEAD[name] for name in ("prediction_length", "context_length")}),
    "patchtsmixer": Recipe({"self_attn": True, "self_attn_heads": 4}),
    "time_series_transformer": Recipe(
        {name: AHEAD[name] for name in ("prediction_length", "context_length")}
    ),
    "timesfm": Recipe(
        FORECAST,
        lambda config: {
            "past_values": normal(BATCH, 64), "past_values_padding": torch.zeros(BATCH, 64).long(),
            "freq": torch.zeros(BATCH, 1).long(),
        },
    ),
    "timesfm2_5": Recipe(FORECAST),
}  # fmt: skip

# Sound.
MIMI = {
    "hidden_size": 32, "num_filters": 4, "upsampling_ratios": [4, 2], "upsample_groups": 32,
}  # fmt: skip
FLOW = {
    "flow_head_config": {
        "condition_dim": 32, "hidden_size": 32, "num_hidden_layers": 2,
        "frequency_embedding_size": 16, "loss_weighting_hidden_size": 8,
    }
}  # fmt: skip
LATENT = {"latent_stride": 4, "latent_dim": 16}
VIBES = {
    "num_filters": 4, "downsampling_ratios": [4, 2], "depths": [1, 1, 1], "hidden_size": 16,
}  # fmt: skip
WAVES = {
    "hidden_size": 32, "codebook_dim": 32, "codebook_size": 16, "num_filters": 4,
    "upsampling_ratios": [4, 2], "decoder_hidden_size": 32, "decoder_intermediate_size": 64,
    "decoder_num_layers": 2, "decoder_attention_num_groups": 4,
}  # fmt: skip
CODEC = {"encoder_hidden_size": 4, "quantization_dim": 64, "quantization_levels": [4, 4]}
FILM = {"pixel_values_videos": normal(BATCH, 4, 3, 16, 16)}
CHANNEL = {"input_values": normal(BATCH, 1, 1600)}


def codec(config) -> dict:
    return {"input_values": normal(BATCH, 1, 3200), "input_features": normal(BATCH, 10, 16)}


SOUND = {
    "csm": Recipe({"text_vocab_size": 99}),
    "dac": Recipe(
        {
            "encoder_hidden_size": 4, "decoder_hidden_size": 32, "downsampling_ratios": [4, 2],
            "upsampling_ratios": [2, 4], "n_codebooks": 2, "codebook_size": 16, "codebook_dim": 4,
        }
    ),
    "dia": Recipe(
        {
            "decoder_config": {
                "cross_num_attention_heads": 4, "cross_num_key_value_heads": 4,
                "cross_head_dim": 8, "cross_hidden_size": 32,
            }
        },
        lambda config: {
            "input_ids": tokens(),
            "decoder_input_ids": tokens(BATCH * 6, 9, seed=4).view(BATCH, 6, 9),
        },
    ),
    "encodec": Recipe(
        {
            "hidden_size": 32, "num_filters": 4, "upsampling_ratios": [4, 2], "codebook_dim": 32,
            "codebook_size": 16,
        }
    ),
    "fun_asr_nano_encoder": Recipe(
        inputs=lambda config: {
            "input_features": normal(BATCH, 16, 112),
            "input_features_mask": torch.ones(BATCH, 16).long(),
        }
    ),
    "gemma3n_audio": Recipe(
        {
            "input_feat_size": 32, "conf_num_attention_heads": 4, "conf_num_hidden_layers": 2,
            "sscp_conv_channel_size": [8, 4],
        },
        lambda config: {
            "audio_mel": normal(BATCH, 64, 32), "audio_mel_mask": torch.zeros(BATCH, 64).bool(),
        },
    ),
    "gemma4_audio": Recipe({"subsampling_conv_channels": [16, 4], "output_proj_dims": 32}),
    "gradium_phonon_tts": Recipe(FLOW),
    "granite_speech5_ctc": Recipe(
        inputs=lambda config: {"input_features": normal(BATCH, 32, 64)}
    ),
    "granite_speech5_encoder": Recipe(
        inputs=lambda config: {"input_features": normal(BATCH, 32, 64)}
    ),
    "mimi": Recipe(
        {
            **MIMI, "codebook_size": 16, "codebook_dim": 16, "num_quantizers": 2,
            "vector_quantization_hidden_dimension": 16,
        }
    ),
    "mimi_decoder": Recipe(MIMI, lambda config: {"latents": normal(BATCH, 32, 8)}),
    "mimi_encoder": Recipe(MIMI),
    "moonshine": Recipe(
        {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4}
    ),
    "moonshine_streaming": Recipe(
        {"num_key_value_heads": 4, "encoder_config": {"num_key_value_heads": 4}}
    ),
    "muse_glimmer_assistant": Recipe(
        {"target_layer_ids": [0, 1]},
        lambda config: {
            "noise_embeds": normal(BATCH, 4, 32),
            "context_hidden_states": normal(BATCH, LENGTH, 64, seed=4),
        },
    ),
    "muse_spark_audio": Recipe(
        {"patch_sizes": [4, 4], "hidden_sizes": [16, 32], "depths": [1, 1], "out_hidden_size": 32}
    ),
    "nemotron3_5_asr": Recipe({"decoder_hidden_size": 32, "prompt_intermediate_size": 32}),
    "nemotron3_5_transcribe_word_timestamp": Recipe({"blank_token_id": 98}),
    "nemotron3_diarization": Recipe(
        {"head_config": {"audio_hidden_size": 32, "hidden_size": 16}}
    ),
    "nemotron_asr_streaming": Recipe({"decoder_hidden_size": 32}),
    "nemotron_asr_streaming_encoder": Recipe({"subsampling_conv_channels": 8}),
    "neucodec": Recipe(CODEC, codec),
    "parakeet_encoder": Recipe({"subsampling_conv_channels": 8}),
    "parakeet_rnnt": Recipe({"decoder_hidden_size": 32}),
    "parakeet_tdt": Recipe({"decoder_hidden_size": 32}),
    "pe_audio": Recipe(inputs=lambda config: {"input_ids": tokens(), **CHANNEL}),
    "pe_audio_encoder": Recipe({"dac_config": {"hidden_size": 16}}),
    "pe_audio_video": Recipe(
        inputs=lambda config: {"input_ids": tokens(), **CHANNEL, **FILM}
    ),
    "pe_audio_video_encoder": Recipe(inputs=lambda config: {**CHANNEL, **FILM}),
    "pe_video": Recipe(inputs=lambda config: {"input_ids": tokens(), **FILM}),
    "pe_video_encoder": Recipe(
        {"vision_config": {"model_type": "vit", "num_labels": 8}}, lambda config: FILM
    ),
    "pocket_tts": Recipe(FLOW),
    "pocket_tts_audio_tokenizer": Recipe({**MIMI, **LATENT}),
    "pocket_tts_audio_tokenizer_decoder": Recipe(
        {**MIMI, **LATENT}, lambda config: {"latents": normal(BATCH, 32, 8)}
    ),
    "pocket_tts_audio_tokenizer_encoder": Recipe({**MIMI, **LATENT}),
    "qwen3_asr_encoder": Recipe(
        {"n_window_infer": 100, "downsample_hidden_size": 8, "output_dim": 32},
        lambda config: {
            "input_features": normal(BATCH, 16, 200),
            "input_features_mask": torch.ones(BATCH, 200).long(),
        },
    ),
    "univnet": Recipe(
        {
            "model_in_channels": 8, "model_hidden_channels": 8,
            "kernel_predictor_hidden_channels": 8,
        },
        lambda config: {
            "input_features": normal(BATCH, 8, 16), "noise_sequence": normal(BATCH, 8, 8, seed=4),
        },
    ),
    "vibevoice": Recipe(
        {"diffusion_head_config": {"latent_size": 16, "frequency_embedding_size": 16}}
    ),
    "vibevoice_acoustic_tokenizer": Recipe(VIBES, lambda config: {**CHANNEL, "sample": False}),
    "vibevoice_acoustic_tokenizer_decoder": Recipe(
        VIBES, lambda config: {"hidden_states": normal(BATCH, 16, 8)}
    ),
    "vibevoice_acoustic_tokenizer_encoder": Recipe(
        VIBES, lambda config: {"hidden_states": normal(BATCH, 1, 1600)}
    ),
    "vits": Recipe(
        {
            "flow_size": 32, "spectrogram_bins": 9, "upsample_initial_channel": 16,
            "upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4],
            "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]],
            "duration_predictor_filter_channels": 16, "use_stochastic_duration_prediction": False,
            "noise_scale": 0.0, "prior_encoder_num_wavenet_layers": 1,
            "posterior_encoder_num_wavenet_layers": 1,
        }
    ),
    "wav2vec2-bert": Recipe(
        {"feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 7}
    ),
    "wavtokenizer": Recipe(WAVES),
    "wavtokenizer_encoder": Recipe(WAVES),
    "xcodec": Recipe(
        {
            "acoustic_model_config": {
                "downsampling_ratios": [8, 5, 4, 2], "upsampling_ratios": [8, 5, 4, 2],
            },
            "semantic_model_config": {
                "conv_dim": [16] * 7, "conv_kernel": [10, 3, 3, 3, 3, 2, 2],
                "conv_stride": [5, 2, 2, 2, 2, 2, 2], "num_feat_extract_layers": 7,
            },
            "codebook_size": 16,
        }
    ),
    "xcodec2": Recipe(CODEC, codec),
}  # fmt: skip

# Towers of stages, and what stands on their features.
STAGES = ["stage1", "stage2", "stage3", "stage4"]
SWIN = {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 2, "num_layers": 2}
SWIN4 = {
    "embed_dim": 8, "depths": [1] * 4, "num_heads": [1, 2, 4, 8], "window_size": 2,
    "image_size": 32, "hidden_size": 64, "num_layers": 4, "out_features": STAGES,
}  # fmt: skip
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1]}
PYRAMID = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
    "num_attention_heads": [2, 4], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2],
}  # fmt: skip
RESNET = {
    "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1] * 4,
    "layer_type": "basic",
}  # fmt: skip
# Blocks of kernel, channels in and out, stride, squeeze; reading keeps the width.
LCNET = {
    "stem_channels": [3, 8, 16], "stage_out_channels": [16, 16, 32, 32],
    "block_configs": [
        [[3, 16, 16, 1, True]], [[3, 16, 16, 2, False]], [[3, 16, 32, 2, False]],
        [[3, 32, 32, 2, False]],
    ],
}  # fmt: skip
NARROW = [[[3, 16, 16, 1, True]], [[3, 16, 16, 1, True]], [[3, 16, 32, [2, 1], True]]]
READER = {"head_out_channels": 99, "hidden_size": 32}
READER_V6 = {
    **READER, "backbone_config": {**LCNET, "block_configs": [*NARROW, [[3, 32, 32, [2, 1], True]]]},
}  # fmt: skip
BANDS = (("longratio", 7), ("midratio", 5), ("shortratio", 3))
OCR = {
    "neck_out_channels": 32, "intraclass_block_number": 4, "kernel_list": [3, 2, 2],
    "scale_factor_list": [1, 2, 4, 8],
    "intraclass_block_config": {
        "reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0],
        **{
            f"{kind}_{band}": [[down, over], [1, 1], [down // 2, over // 2]]
            for band, side in BANDS
            for kind, down, over in (
                ("vertical_long_to_small_conv", side, 1),
                ("horizontal_small_to_long_conv", 1, side),
                ("symmetric_conv_long", side, side),
            )
        },
    },
}  # fmt: skip
DINO = {"out_features": ["stage1", "stage2"]}
REASSEMBLED = {
    "backbone_config": DINO, "reassemble_factors": [1, 0.5], "neck_hidden_sizes": [16, 16],
    "fusion_hidden_size": 16,
}  # fmt: skip
ANYTHING = {**REASSEMBLED, "reassemble_hidden_size": 32, "head_hidden_size": 8}
EOMT = {"num_blocks": 1, "num_queries": 5, "num_upscale_blocks": 1}
POINTS = {
    "hidden_size": 32,
    "keypoint_detector_config": {
        "encoder_hidden_sizes": [8] * 4, "decoder_hidden_size": 16, "descriptor_decoder_dim": 32,
        "max_keypoints": 8, "keypoint_threshold": 0.0, "border_removal_distance": 1,
    },
}  # fmt: skip


def photo(side: int, *between: int, channels: int = 3):
    """Inputs of images of this side."""
    return lambda config: {"pixel_values": normal(BATCH, *between, channels, side, side)}


def line(config) -> dict:
    """A line of writing."""
    return {"pixel_values": normal(BATCH, 3, 48, 64)}


DENSE = {
    "bit": Recipe({**RESNET, "layer_type": "preactivation", "num_groups": 4}),
    "chmv2": Recipe(
        {
            "backbone_config": DINO, "reassemble_factors": [1, 0.5],
            "post_process_channels": [16, 16], "fusion_hidden_size": 16, "head_hidden_size": 8,
            "number_output_channels": 16,
        }
    ),
    "convnext": Recipe({**CONVNEXT, "num_stages": 2}),
    "convnextv2": Recipe({**CONVNEXT, "num_stages": 2}),
    "depth_anything": Recipe(ANYTHING),
    "depth_pro": Recipe(
        {
            "patch_size": 16, "fusion_hidden_size": 16, "intermediate_hook_ids": [1, 0],
            "intermediate_feature_dims": [16, 16], "scaled_images_feature_dims": [32, 32, 16],
        },
        photo(64),
    ),
    "dinov3_convnext": Recipe(CONVNEXT),
    "donut-swin": Recipe(SWIN),
    "efficientloftr": Recipe(
        {
            "stage_num_blocks": [1] * 4, "out_features": [8, 8, 16, 32],
            "num_attention_layers": 1, "num_key_value_heads": 4,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 2.0,
            },
        },
        photo(64, 2),
    ),
    "efficientnet": Recipe({**EFFICIENT, "image_size": 32, "hidden_dim": 1280}),
    "eomt": Recipe(EOMT),
    "eomt_dinov3": Recipe(EOMT),
    "glpn": Recipe(PYRAMID),
    "hgnet_v2": Recipe(
        {
            "stem_channels": [3, 8, 8], "stage_in_channels": [8, 8, 16, 16],
            "stage_mid_channels": [8] * 4, "stage_out_channels": [8, 16, 16, 32],
            "stage_num_blocks": [1] * 4, "stage_numb_of_layers": [1] * 4, "depths": [1] * 4,
            "hidden_sizes": [8, 16, 16, 32],
        },
        photo(64),
    ),
    "hiera": Recipe({"embed_dim": 8, "depths": [1] * 4, "image_size": [64, 64], "hidden_size": 64}),
    "levit": Recipe(
        {
            "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 4, 6], "key_dim": [8] * 3,
            "depths": [1] * 3, "image_size": 64, "patch_size": 16,
        }
    ),
    "lightglue": Recipe({**POINTS, "descriptor_dim": 32}, photo(32, 2)),
    "maskformer-swin": Recipe(SWIN),
    "mgp-str": Recipe(
        {"num_bpe_labels": 99, "num_wordpiece_labels": 99, "image_size": [8, 16]}
    ),
    "mobilevit": Recipe(
        {
            "hidden_sizes": [32, 32, 32], "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
            "aspp_out_channels": 16, "patch_size": 2,
        },
        photo(64),
    ),
    "mobilevitv2": Recipe({"width_multiplier": 0.25, "patch_size": 2}, photo(64)),
    "poolformer": Recipe({"depths": [1] * 4, "hidden_sizes": [8, 8, 16, 16]}),
    "pp_ocrv5_mobile_rec": Recipe(
        {
            **READER,
            "backbone_config": {
                "scale": 1.0, "out_features": ["stage5"],
                "block_configs": [
                    *NARROW, [[3, 32, 32, [2, 1], True]], [[5, 32, 32, [2, 1], True]],
                ],
            },
        },
        line,
    ),
    "pp_ocrv5_server_det": Recipe(
        {**OCR, "backbone_config": {"out_features": STAGES}}, photo(64)
    ),
    "pp_ocrv5_server_rec": Recipe(
        {
            **READER,
            "backbone_config": {
                "stem_strides": [2, 1, 1, 1, 1], "stage_downsample": [True] * 4,
                "stage_downsample_strides": [[2, 1], [1, 2], [2, 1], [2, 1]],
            },
        },
        line,
    ),
    "pp_ocrv6_medium_det": Recipe(
        {**OCR, "backbone_config": {**LCNET, "out_features": STAGES}}, photo(64)
    ),
    "pp_ocrv6_small_rec": Recipe(READER_V6, line),
    "pp_ocrv6_tiny_rec": Recipe(READER_V6, line),
    "prompt_depth_anything": Recipe(
        ANYTHING,
        lambda config: {"pixel_values": pixels(config), "prompt_depth": normal(BATCH, 1, 8, 8)},
    ),
    "pvt": Recipe({**PYRAMID, "patch_sizes": [4, 2], "sequence_reduction_ratios": [2, 1]}),
    "radio": Recipe({"max_img_size": 64}),
    "regnet": Recipe({**RESNET, "layer_type": "y", "groups_width": 8}),
    "resnet": Recipe(RESNET),
    "rt_detr_resnet": Recipe(RESNET),
    "sapiens2": Recipe({"num_key_value_heads_per_layer": [4, 2]}),
    "segformer": Recipe(PYRAMID),
    "seggpt": Recipe(
        {
            "image_size": [32, 16], "pretrain_image_size": 16, "merge_index": 0,
            "intermediate_hidden_state_indices": [0, 1], "decoder_hidden_size": 8,
        },
        lambda config: {
            "pixel_values": normal(BATCH, 3, 16, 16),
            "prompt_pixel_values": normal(BATCH, 3, 16, 16, seed=4),
            "prompt_masks": normal(BATCH, 3, 16, 16, seed=5),
        },
    ),
    "superglue": Recipe(
        {**POINTS, "keypoint_encoder_sizes": [16, 32], "gnn_layers_types": ["self", "cross"]},
        photo(32, 2),
    ),
    "swin": Recipe(SWIN),
    "swin2sr": Recipe({**SWIN, "patch_size": 1, "num_heads": [2, 2], "window_size": 4}),
    "swinv2": Recipe({**SWIN, "pretrained_window_sizes": [0, 0]}),
    "textnet": Recipe(
        {
            "stem_out_channels": 8, "hidden_sizes": [8, 8, 16, 16, 32], "image_size": [64, 64],
        }
    ),
    "tipsv2_dpt": Recipe({**REASSEMBLED, "num_depth_bins": 8}),
    "tvp": Recipe(
        {
            "backbone_config": {"out_features": ["stage4"]}, "max_img_size": 64,
            "visual_prompt_size": 8, "num_frames": 2,
        },
        lambda config: {"input_ids": tokens(1), "pixel_values": normal(1, 2, 3, 64, 64)},
    ),
    "upernet": Recipe(
        {
            "backbone_config": {"out_features": STAGES}, "pool_scales": [1, 2], "hidden_size": 16,
            "auxiliary_channels": 8, "auxiliary_in_channels": 16,
        },
        photo(64),
    ),
    "vit_mae": Recipe(  # it would draw which patches it hides
        {}, lambda config: {"pixel_values": pixels(config), "noise": normal(BATCH, 16)}
    ),
    "vitmatte": Recipe(
        {
            "backbone_config": {"num_channels": 4, "image_size": 32, "patch_size": 16},
            "convstream_hidden_sizes": [8, 8, 8], "fusion_hidden_sizes": [8, 8, 8, 8],
        },
        photo(32, channels=4),
    ),
    "vitpose_backbone": Recipe(
        {"image_size": [32, 32], "patch_size": [8, 8], "num_experts": 1}
    ),
    "yolos": Recipe({"image_size": [16, 16], "num_detection_tokens": 8}),
    "zoedepth": Recipe(
        {
            "backbone_config": {"num_hidden_layers": 4, "out_features": STAGES},
            "neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 16, "num_relative_features": 8,
            "bottleneck_features": 16, "num_attractors": [4, 4, 2, 1], "bin_embedding_dim": 16,
            "bin_configurations": [{"n_bins": 8, "min_depth": 0.001, "max_depth": 10.0}],
        }
    ),
}  # fmt: skip

# Detectors and segmenters that ask by queries.
QUERIES = {"num_queries": 8}
DETR = {**QUERIES, "backbone_config": {"model_type": "resnet", "out_features": STAGES}}
HYBRID = {
    **QUERIES, "encoder_in_channels": [16, 16, 32], "encoder_hidden_dim": 32,
    "decoder_in_channels": [32] * 3,
}  # fmt: skip
RT = {**HYBRID, "backbone_config": {"out_features": STAGES[1:]}}
FINE = {**HYBRID, "backbone_config": {"out_features": STAGES[1:]}, "lqe_hidden_dim": 8}
LAYOUT = {
    **HYBRID, "mask_feature_channels": [8, 8], "x4_feat_dim": 8, "num_prototypes": 8,
    "global_pointer_head_size": 8, "backbone_config": {"out_features": STAGES},
}  # fmt: skip
GROUPS = {
    **QUERIES, "decoder_self_attention_heads": 4, "decoder_cross_attention_heads": 4,
    "group_detr": 1, "c2f_num_blocks": 1,
}  # fmt: skip
DINO_TEXT = {**QUERIES, "backbone_config": {**SWIN4, "out_features": STAGES[1:]}}
MASKS = {
    "num_queries": 5, "backbone_config": SWIN4, "hidden_dim": 32, "decoder_layers": 3,
    "encoder_feedforward_dim": 32, "dim_feedforward": 32,
}  # fmt: skip
SMALL = photo(64)

DETECTORS = {
    "conditional_detr": Recipe(DETR, SMALL),
    "d_fine": Recipe(FINE, SMALL),
    "dab-detr": Recipe(DETR, SMALL),
    "deformable_detr": Recipe(
        {**DETR, "backbone_config": {**DETR["backbone_config"], "out_features": STAGES[1:]}}, SMALL
    ),
    "deimv2": Recipe(FINE, SMALL),
    "detr": Recipe(DETR, SMALL),
    "grounding-dino": Recipe(DINO_TEXT, pair),
    "lw_detr": Recipe(
        {
            **GROUPS, "projector_scale_factors": [1.0],
            "backbone_config": DINO,
        }
    ),
    "lw_detr_vit": Recipe({"window_block_indices": [0], "num_windows": 4, "image_size": 32}),
    "mask2former": Recipe({**MASKS, "feature_size": 32, "mask_feature_size": 32}),
    "maskformer": Recipe(
        {"backbone_config": SWIN4, "fpn_feature_size": 32, "mask_feature_size": 32}
    ),
    "mm-grounding-dino": Recipe(DINO_TEXT, pair),
    "omdet-turbo": Recipe(
        {
            **QUERIES, "backbone_config": {
                "model_type": "swin", **SWIN4, "out_features": STAGES[1:],
            },
            "encoder_in_channels": [16, 32, 64], "vision_features_channels": [32] * 3,
            "text_config": {"hidden_size": 64}, "text_projection_in_dim": 64,
            "text_projection_out_dim": 64, "class_embed_dim": 64,
            "task_encoder_hidden_dim": 32, "encoder_dim_feedforward": 32,
            "decoder_hidden_dim": 32, "decoder_dim_feedforward": 32, "decoder_num_heads": 4,
            "decoder_num_layers": 2, "image_size": 32,
            "apply_layernorm_after_vision_backbone": False,
        },
        lambda config: {
            "pixel_values": pixels(config),
            "classes_input_ids": tokens(4), "classes_attention_mask": torch.ones(4, LENGTH).long(),
            "tasks_input_ids": tokens(), "tasks_attention_mask": torch.ones(BATCH, LENGTH).long(),
            "classes_structure": torch.tensor([2, 2]),
        },
    ),
    "oneformer": Recipe(
        {
            **MASKS, "conv_dim": 32, "mask_dim": 32, "task_seq_len": LENGTH,
            "text_encoder_width": 32, "text_encoder_context_length": LENGTH,
            "text_encoder_num_layers": 2, "text_encoder_vocab_size": 99,
        },
        lambda config: {"pixel_values": pixels(config), "task_inputs": tokens()},
    ),
    "pp_doclayout_v2": Recipe(
        {
            **HYBRID, "backbone_config": {"out_features": STAGES[1:]},
            "class_thresholds": [0.5, 0.5], "class_order": [0, 1],
            "reading_order_config": {
                "vocab_size": 4, "coordinate_size": 4, "shape_size": 8,
                "global_pointer_head_size": 8,
            },
        },
        SMALL,
    ),
    "pp_doclayout_v3": Recipe(LAYOUT, SMALL),
    "pp_doclayout_v4": Recipe({**LAYOUT, "backbone_config": {"out_features": STAGES[1:]}}, SMALL),
    "rf_detr": Recipe(
        {**GROUPS, "backbone_config": {**DINO, "num_windows": 2, "window_block_indexes": [0]}}
    ),
    "rt_detr": Recipe(RT, SMALL),
    "rt_detr_v2": Recipe(RT, SMALL),
    "table-transformer": Recipe(DETR, SMALL),
}  # fmt: skip

# Segment anything.
PROMPT = {"hidden_size": 64, "image_size": 64, "patch_size": 16, "mask_input_channels": 4}
MASK = {"hidden_size": 64, "mlp_dim": 64, "iou_head_hidden_dim": 32}
SAM = {
    "vision_config": {
        "output_channels": 64, "image_size": 64, "patch_size": 16, "window_size": 2,
        "global_attn_indexes": [1], "num_pos_feats": 32,
    },
    "prompt_encoder_config": {**PROMPT, "image_embedding_size": 4},
    "mask_decoder_config": MASK,
}  # fmt: skip
NECK = {
    "backbone_channel_list": [64, 32, 16, 8], "fpn_hidden_size": 64,
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
}  # fmt: skip
SAM2 = {"prompt_encoder_config": PROMPT, "mask_decoder_config": MASK}
SAM3_VISION = {
    "backbone_config": {
        "image_size": 64, "pretrain_image_size": 32, "patch_size": 16, "window_size": 2,
        "global_attn_indexes": [1],
    },
    "fpn_hidden_size": 64, "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
}  # fmt: skip
MEMORY = {
    "image_size": 64, "memory_attention_hidden_size": 64,
    "memory_attention_feed_forward_hidden_size": 32, "memory_attention_mlp_hidden_size": 32,
    "memory_attention_num_layers": 2, "memory_attention_rope_feat_sizes": [4, 4],
    "memory_encoder_hidden_size": 64, "memory_encoder_output_channels": 64,
    "mask_downsampler_embed_dim": 64, "memory_fuser_embed_dim": 64,
    "memory_fuser_intermediate_dim": 32, "num_maskmem": 2,
}  # fmt: skip
SAM3 = {
    "vision_config": SAM3_VISION, "detr_decoder_config": {**QUERIES, "hidden_size": 64},
    **{
        f"{part}_config": {"hidden_size": 64}
        for part in ("geometry_encoder", "detr_encoder", "mask_decoder")
    },
}  # fmt: skip
TRACKER = {
    "vision_config": SAM3_VISION, "prompt_encoder_config": PROMPT, "mask_decoder_config": MASK,
    **MEMORY,
}  # fmt: skip


def clicks(config) -> dict:
    return {
        "pixel_values": normal(BATCH, 3, 64, 64),
        "input_points": torch.tensor([[8.0, 8.0], [40.0, 20.0]]).expand(BATCH, 1, 2, 2),
        "input_labels": torch.tensor([1, 0]).expand(BATCH, 1, 2),
    }


def session(*remembered: int):
    """A video whose first frame an object was marked in, to be followed into the second."""

    def make(config) -> dict:
        module = importlib.import_module(
            type(config).__module__.replace(".configuration_", ".modeling_")
        )
        kind = getattr(module, type(config).__name__.replace("Config", "InferenceSession"))
        video = kind(normal(2, 3, 64, 64), 64, 64, dtype=torch.float32)
        video.obj_id_to_idx(1)
        memory = {
            "maskmem_features": normal(*remembered),
            "maskmem_pos_enc": normal(*remembered),
            "object_pointer": normal(1, 64),
            "object_score_logits": torch.ones(1, 1),
            "pred_masks": normal(1, 1, 16, 16),
        }
        video.store_output(0, 0, output_value=memory, is_conditioning_frame=True)
        return {"inference_session": video, "frame_idx": 1}

    return make


def search(config) -> dict:
    """A video that a text is looked for in."""
    from transformers.models.sam3_video.modeling_sam3_video import Sam3VideoInferenceSession

    video = Sam3VideoInferenceSession(normal(2, 3, 64, 64), 64, 64, dtype=torch.float32)
    prompt = video.add_prompt("cat")
    video.prompt_input_ids[prompt] = tokens(1)
    video.prompt_attention_masks[prompt] = torch.ones(1, LENGTH).long()
    return {"inference_session": video, "frame_idx": 0}


SEGMENT = {
    "edgetam": Recipe(  # only timm has a backbone that gives what it takes, so without one
        SAM2,
        lambda config: {
            "image_embeddings": [
                normal(BATCH, 8, 16, 16), normal(BATCH, 16, 8, 8), normal(BATCH, 64, 4, 4),
            ],
            **{name: value for name, value in clicks(config).items() if name != "pixel_values"},
        },
    ),
    "edgetam_video": Recipe(
        {
            **SAM2, **MEMORY, "memory_attention_rope_k_sizes": [4, 4],
            "perceiver_resampler_num_latents": 16, "perceiver_resampler_num_latents_2d": 16,
            "perceiver_resampler_hidden_size": 64, "perceiver_resampler_attention_head_dim": 64,
            "perceiver_resampler_mlp_intermediate_size": 32,
        },
        session(1, 32, 64),
    ),
    "edgetam_vision_model": Recipe({**NECK, "backbone_config": DETR["backbone_config"]}),
    "sam": Recipe(SAM, clicks),
    "sam2": Recipe(SAM2, clicks),
    "sam2_hiera_det_model": Recipe(
        {
            "image_size": [64, 64], "hidden_size": 8, "embed_dim_per_stage": [8, 16, 32, 64],
            "num_attention_heads": 1, "num_attention_heads_per_stage": [1, 2, 4, 8],
            "blocks_per_stage": [1, 1, 2, 1], "window_size_per_stage": [4, 4, 2, 2],
            "global_attention_blocks": [3], "window_positional_embedding_background_size": [4, 4],
        },
        SMALL,
    ),
    "sam2_video": Recipe({**SAM2, **MEMORY}, session(16, 1, 64)),
    "sam2_vision_model": Recipe(NECK, SMALL),
    "sam3": Recipe(
        SAM3,
        lambda config: {"pixel_values": normal(BATCH, 3, 64, 64), "input_ids": tokens()},
    ),
    "sam3_tracker": Recipe(
        {
            "vision_config": SAM3_VISION, "prompt_encoder_config": PROMPT,
            "mask_decoder_config": MASK,
        },
        clicks,
    ),
    "sam3_tracker_video": Recipe(TRACKER, session(16, 1, 64)),
    "sam3_video": Recipe(
        {  # every query finds something, which is followed from then on
            "detector_config": SAM3, "tracker_config": TRACKER, "low_res_mask_size": 16,
            "image_size": 64, "score_threshold_detection": 0.0, "new_det_thresh": 0.0,
            "det_nms_thresh": 0.0, "hotstart_delay": 0,
        },
        search,
    ),
    "sam_hq": Recipe({**SAM, "mask_decoder_config": {**MASK, "vit_dim": 32}}, clicks),
}  # fmt: skip

RECIPES: dict[str, Recipe] = {
    **TOWERS, **PAIRS, **VIDEOS, **SERIES, **SOUND, **DENSE, **DETECTORS, **SEGMENT,
}  # fmt: skip
