"""Small random models of the families that the tests run through, float32, on the CPU."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    ViTConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import hf_sigmoid

WINDOW = 6  # gemma3's sliding layers
DECODERS = ("llama", "qwen3", "gemma3", "gpt2")
FAMILIES = (*DECODERS, "bert", "vit", "whisper")

_SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
_CONFIGS = {
    "llama": lambda: LlamaConfig(**_GROUPED),
    "qwen3": lambda: Qwen3Config(**_GROUPED),
    "gemma3": lambda: Gemma3TextConfig(
        **_GROUPED,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=8,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=99,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "bert": lambda: BertConfig(**_SIZES),
    "vit": lambda: ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
    ),
    "whisper": lambda: WhisperConfig(
        vocab_size=99,
        d_model=32,
        **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
}
_CLASSES = {"bert": AutoModel, "vit": AutoModel}


def config(family: str):
    """A fresh config."""
    return _CONFIGS[family]()


def build(family: str, **kwargs) -> PreTrainedModel:
    """A random model in evaluation mode."""
    torch.manual_seed(0)
    if family == "whisper":
        return WhisperForConditionalGeneration._from_config(config(family), **kwargs).eval()
    return _CLASSES.get(family, AutoModelForCausalLM).from_config(config(family), **kwargs).eval()


def converted(family: str, function: str) -> PreTrainedModel:
    """A model whose per-query terms are learned and differ between heads and layers."""
    model = build(family)
    linear = function == "sigmoid"
    hf_sigmoid.configure(model, function, learn=True, query=linear, hidden=linear)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "log_length" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() > 1:
                parameter.mul_(4)  # so that attention is far from uniform
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes, and an end-of-text token."""
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def tokens(rows: int = 2, length: int = 12, seed: int = 2) -> torch.Tensor:
    """Token ids that are none of the special ones."""
    return torch.randint(5, 99, (rows, length), generator=torch.Generator().manual_seed(seed))


def inputs(family: str, rows: int = 2) -> dict[str, torch.Tensor]:
    """What the model's forward takes."""
    generator = torch.Generator().manual_seed(3)
    if family == "vit":
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)}
    if family == "whisper":
        features = torch.randn(rows, 8, 32, generator=generator)
        return {"input_features": features, "decoder_input_ids": tokens(rows)}
    return {"input_ids": tokens(rows)}


def output(model: PreTrainedModel, **kwargs) -> torch.Tensor:
    """Logits, or the last hidden state of a model without a head."""
    with torch.no_grad():
        result = model(**kwargs)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def byte_llama(folder) -> LlamaForCausalLM:
    """A random two-layer llama that reads bytes; its tokenizer is saved in `folder`."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)
