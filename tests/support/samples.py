"""What a tiny model's forward takes, told from its signature."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

BATCH, LENGTH = 2, 12
GRID = torch.tensor([[1, 4, 4], [1, 4, 8]])  # the patches of two images: frames, height, width
# Encoders whose features are bins by time, and codecs whose sound has a dimension of channels.
BINS_FIRST = (
    "whisper", "voxtral", "audioflamingo3", "glmasr", "qwen2_audio", "moss_transcribe", "qwen3_asr",
)  # fmt: skip
CHANNELS = (
    "mimi", "encodec", "dac", "pocket_tts_audio", "vibevoice_acoustic", "pe_audio", "omniasr",
    "wavtokenizer", "xcodec",
)  # fmt: skip


_other = 0  # added to every seed of `tokens`


@contextmanager
def other_tokens(number: int) -> Iterator[None]:
    """While it lasts, `tokens` draws others."""
    global _other
    _other = 1000 * number
    try:
        yield
    finally:
        _other = 0


def tokens(rows: int = BATCH, length: int = LENGTH, seed: int = 2) -> Tensor:
    """Token ids that are none of the special ones."""
    generator = torch.Generator().manual_seed(seed + _other)
    return torch.randint(5, 90, (rows, length), generator=generator)


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def find(config, *names):
    """The first of these fields that the config or one of its parts has."""
    pending = [config]
    while pending:
        each = pending.pop(0)
        for name in names:
            if (value := getattr(each, name, None)) is not None and not callable(value):
                return value
        pending += [
            getattr(each, name)
            for name in each.sub_configs or {}
            if getattr(each, name, None) is not None
        ]
    return None


def pixels(config, frames: int = 0) -> Tensor:
    """Images, or videos of this many frames."""
    size = find(config, "image_size", "input_size", "crop_size") or 16
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = find(config, "num_channels", "in_channels", "in_chans") or 3
    return normal(BATCH, *[frames] * bool(frames), channels, height, width)


def patches(config, grid: Tensor, *shape: int) -> Tensor:
    """The patches of images of these (frames, height, width), a row each, or of another shape."""
    channels, side = find(config, "num_channels", "in_channels") or 3, find(config, "patch_size")
    deep = find(config, "temporal_patch_size", "patch_temporal") or 1
    return normal(int(grid.prod(-1).sum()), *(shape or (channels * deep * side**2,)))


def inputs(model) -> dict[str, Tensor]:
    """Keyword arguments of `model.forward`."""
    from support.recipes import RECIPES

    config = model.config
    recipe = RECIPES.get(config.model_type)
    if recipe and recipe.inputs:
        return recipe.inputs(config)
    given = list(inspect.signature(model.forward).parameters)
    made = _words(model, given) if "input_ids" in given else _signals(config, given)
    if "decoder_input_ids" in given and (config.is_encoder_decoder or "input_ids" not in given):
        made["decoder_input_ids"] = tokens(seed=4)
    return made


def _words(model, given: list[str]) -> dict[str, Tensor]:
    """Text, with images where the model cannot do without."""
    config, main = model.config, model.main_input_name
    made = {"input_ids": tokens()}
    if "pixel_values" in given and (main == "pixel_values" or "return_loss" in given):
        made["pixel_values"] = pixels(config)
    if "bbox" in given:
        made["bbox"] = torch.tensor([1, 2, 3, 4]).expand(BATCH, LENGTH, 4)
    return made


def _signals(config, given: list[str]) -> dict[str, Tensor]:
    """Sound, images, series, or the states of another model."""
    bins = find(config, "num_mel_bins", "feature_size", "input_dim") or 16
    frames = find(config, "num_frames", "frames_per_clip") or 0
    if "grid_thw" in given:
        rows = next(name for name in ("pixel_values", "hidden_states") if name in given)
        return {rows: patches(config, GRID), "grid_thw": GRID}
    if "input_values" in given:
        if config.model_type == "audio-spectrogram-transformer":
            return {"input_values": normal(BATCH, find(config, "max_length"), bins)}
        channels = [1] * config.model_type.startswith(CHANNELS)
        return {"input_values": normal(BATCH, *channels, 1600)}
    if "input_features" in given:
        length = 2 * (find(config, "max_source_positions") or 32)
        first = config.model_type.startswith(BINS_FIRST)
        made = {"input_features": normal(BATCH, *(bins, length) if first else (64, bins))}
        if "input_features_mask" in given:
            made["input_features_mask"] = torch.ones(BATCH, length if first else 64).long()
        return made
    if "pixel_values" in given:
        return {"pixel_values": pixels(config, frames)}
    if "pixel_values_videos" in given:
        return {"pixel_values_videos": pixels(config, frames or 2)}
    if "past_values" in given:
        return _series(config, given)
    for name in ("inputs_embeds", "hidden_states"):
        if name in given:
            width = find(config, "hidden_size", "d_model", "dim") or 32
            return {name: normal(BATCH, LENGTH, width)}
    return {}


def _series(config, given: list[str]) -> dict[str, Tensor]:
    """The past of a time series, and its future where the model decodes."""
    length = config.context_length
    if "future_time_features" not in given:
        channels = find(config, "num_input_channels")
        return {"past_values": normal(BATCH, length, *[channels] * (channels is not None))}
    past, ahead = length + max(config.lags_sequence), config.prediction_length
    return {
        "past_values": normal(BATCH, past), "past_observed_mask": torch.ones(BATCH, past),
        "past_time_features": normal(BATCH, past, config.num_time_features),
        "future_values": normal(BATCH, ahead, seed=4),
        "future_time_features": normal(BATCH, ahead, config.num_time_features, seed=5),
    }  # fmt: skip
