"""Conversions of every kind of model that reads text: to both functions, loaded, and back again."""

import json
from pathlib import Path

import pytest
import releases
import tiny_models
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedModel

from hf_sigmoid import compat, configuration, parameters, text
from hf_sigmoid.command_line import main
from hf_sigmoid.compat import RELEASE
from hf_sigmoid.conversions import apply, calibrate, convert, pictures, plan, revert
from hf_sigmoid.conversions.calibrate import collect
from hf_sigmoid.conversions.compare import token_windows
from hf_sigmoid.conversions.models import load, model_class, part_of
from hf_sigmoid.conversions.reading import METRICS, feed, outputs
from hf_sigmoid.conversions.revert import revert_checkpoint
from hf_sigmoid.conversions.verify import runs

WINDOW = 24  # tokens of a text; sliding windows and chunks are shorter
SMALL = {"window": WINDOW, "windows": 4, "progress": False}

SIZES = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 8, "projection_dim": 16,
}  # fmt: skip
T5 = {"vocab_size": 260, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = {
    "vocab_size": 260, "d_model": 32, "max_position_embeddings": 64, "pad_token_id": 0,
    **{f"{side}_{name}": size for side in ("encoder", "decoder")
       for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))},
}  # fmt: skip
MLA = {
    **SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
LLAMA4 = {
    **GROUPED, "attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"],
    "attn_temperature_tuning": False, "num_local_experts": 2, "intermediate_size_mlp": 48,
}  # fmt: skip
QWEN2_VL = {
    "text_config": {**GROUPED, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4,
                      "patch_size": 4, "mlp_ratio": 2},
    "image_token_id": 258, "video_token_id": 259, "vision_start_token_id": 257,
}  # fmt: skip
GEMMA3 = {"text_config": {**GROUPED, **SLIDING}, "vision_config": {
    **VISION, "model_type": "siglip_vision_model"}, "image_token_index": 259,
    "mm_tokens_per_image": 4}  # fmt: skip
# An older release lists the parts in another order.
PART = "--part must be one of vision_config, text_config"
if not releases.IS_NEWEST:
    PART = "--part must be one of .*text_config.*"
LLAVA = {"text_config": {**GROUPED, "model_type": "llama"}, "vision_config": {
    **VISION, "model_type": "clip_vision_model"}, "image_token_index": 259}  # fmt: skip

KINDS = {
    "grouped": ("LlamaForCausalLM", GROUPED),
    "latent": ("DeepseekV3ForCausalLM", MLA),
    "fused_gpt_neox": ("GPTNeoXForCausalLM", SIZES),
    "fused_gpt2": ("GPT2LMHeadModel", SIZES),
    "fused_phi3": ("Phi3ForCausalLM", GROUPED),
    "sliding_mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 6}),
    "sliding_gemma2": ("Gemma2ForCausalLM", {**GROUPED, **SLIDING}),
    "sliding_gemma3": ("Gemma3ForCausalLM", {**GROUPED, **SLIDING}),
    "chunked_llama4": ("Llama4ForCausalLM", LLAMA4),
    "tied": ("LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "sharded": ("LlamaForCausalLM", GROUPED),
    "bfloat16": ("LlamaForCausalLM", GROUPED),
    "masked_bert": ("BertForMaskedLM", SIZES),
    "masked_roberta": ("RobertaForMaskedLM", SIZES),
    "masked_modernbert": ("ModernBertForMaskedLM", {**SIZES, "local_attention": 8}),
    "features_bert": ("BertForSequenceClassification", SIZES),
    "features_clip": ("CLIPModel", {"text_config": SIZES, "vision_config": VISION}),
    "seq2seq_t5": ("T5ForConditionalGeneration", T5),
    "seq2seq_bart": ("BartForConditionalGeneration", BART),
    "composite_llava": ("LlavaForConditionalGeneration", LLAVA),
    "composite_qwen2_vl": ("Qwen2VLForConditionalGeneration", QWEN2_VL),
    "composite_gemma3": ("Gemma3ForConditionalGeneration", GEMMA3),
}
# Soft caps and learned biases leave PyTorch's softmax kernel: the same sums in another order.
ANOTHER_ORDER = ("sliding_gemma2", "seq2seq_t5")


@pytest.fixture(autouse=True)
def _is_on_the_interface(request):
    """A test of a kind of model runs where its class takes an attention function."""
    kind = getattr(request.node, "callspec", None) and request.node.callspec.params.get("kind")
    if kind in KINDS:
        releases.skip_if_refused(getattr(transformers, KINDS[kind][0]))


def build(kind: str) -> PreTrainedModel:
    """A random model whose attention is far from uniform."""
    name, fields = KINDS[kind]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # T5 does not scale its logits, and has large ones as it is.
            if parameter.dim() > 1 and kind != "seq2seq_t5":
                parameter.mul_(4)
    return model.to(torch.bfloat16) if kind == "bfloat16" else model


def save(model: PreTrainedModel, folder: Path, **options) -> Path:
    model.save_pretrained(folder, **options)
    return save_tokenizer(folder)


def save_tokenizer(folder: Path) -> Path:
    tokenizer = tiny_models.byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>", "pad_token": "<pad>"})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """To draw pictures and to tokenize a whole novel takes a second each."""
    monkeypatch.setattr(pictures, "draw", lambda *args: [])
    for name in ("train", "held_out"):
        beginning = getattr(text, name)()[:4000]
        monkeypatch.setattr(text, name, lambda beginning=beginning: beginning)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders of checkpoints by kind, each made once."""
    made: dict[str, Path] = {}

    def source(kind: str) -> Path:
        if kind not in made:
            options = {"max_shard_size": "40KB"} if kind == "sharded" else {}
            made[kind] = save(build(kind), tmp_path_factory.mktemp(kind), **options)
        return made[kind]

    return source


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("model*.safetensors"):
        found |= load_file(file)
    if Version("5.6") > RELEASE:  # it writes what it read by BERT's first names of a norm's numbers
        for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
            found = {name.replace(old, new): tensor for name, tensor in found.items()}
    return found


def assert_same_checkpoint(a: Path, b: Path) -> None:
    """Weights bit for bit, in as many files, and the same config."""
    first, second = tensors(a), tensors(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name
    assert len([*a.glob("model*.safetensors")]) == len([*b.glob("model*.safetensors")])
    config, other = (json.loads((folder / "config.json").read_text()) for folder in (a, b))
    for fields in (config, other):
        for part in fields.values():  # transformers notes the dtype there when it loads a model
            part.pop("dtype", None) if isinstance(part, dict) else None
    assert config == other


def text_ids() -> torch.Tensor:
    return torch.randint(5, 250, (2, WINDOW), generator=torch.Generator().manual_seed(1))


def read(model: PreTrainedModel) -> torch.Tensor:
    model = part_of(model, "text_config") if isinstance(model, transformers.CLIPModel) else model
    with torch.no_grad():
        return outputs(model(**feed(model, text_ids())))


@pytest.mark.parametrize("kind", KINDS)
def test_ssmax_is_the_same_model_and_comes_back(sources, tmp_path, kind):
    source = sources(kind)
    report = convert(source, tmp_path / "out", "ssmax", **SMALL)
    family = kind.split("_")[0]
    assert report["metric"] == METRICS.get(family, METRICS["causal"])
    ways = {"plain", "padded"}
    if family not in ("masked", "features"):
        ways |= {"decoded with a cache"} | ({"packed"} if family != "seq2seq" else set())
    assert ways - {"packed"} <= set(report["largest_logit_difference"]) <= ways
    before, after = load(str(source)), load(str(tmp_path / "out"))
    assert type(after).__name__ == KINDS[kind][0]
    if kind in ANOTHER_ORDER:
        torch.testing.assert_close(read(before), read(after), atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(read(before), read(after))
    holders = dict(parameters.holders(after))
    assert set(holders) == set(report["plan"]["converted"]) and holders
    part = report["plan"]["part"]
    assert set(holders.values()) == {
        m for _, m in parameters.attention_modules(part_of(after, part))
    }
    assert main(["revert", str(tmp_path / "out"), str(tmp_path / "back"), "--json"]) == 0
    assert_same_checkpoint(source, tmp_path / "back")


@pytest.mark.parametrize("kind", KINDS)
def test_sigmoid_is_fitted_to_every_module_and_comes_back(sources, tmp_path, kind):
    source, out = sources(kind), tmp_path / "out"
    report = convert(source, out, "sigmoid", init="calibrated-query", **SMALL)
    before = load(str(source))
    ids = token_windows(AutoTokenizer.from_pretrained(source), text.train(), WINDOW, 4)
    sums = collect(before, [ids], part=report["plan"]["part"], progress=False)
    assert set(report["modules"]) == set(report["plan"]["converted"]) <= set(sums)
    for name, row in report["modules"].items():
        each = sums[name]
        # The mean square of L − log n, which a bias of −log n leaves.
        left = (each.square - 2 * each.moment[:, 1, 0] + each.gram[:, 1, 1]) / each.rows
        assert row["residual_nats"] < left.mean().sqrt()
        assert row["r_squared"] <= 1
    model = load(str(out))
    for name, module in parameters.holders(model):
        assert module.config._attn_implementation == "sigmoid"
        assert module.log_length.offset.dtype == torch.float32, name
        assert not module.log_length.is_initial(), name
    assert not torch.equal(read(model), read(before))
    assert revert_checkpoint(out, tmp_path / "back")
    assert_same_checkpoint(source, tmp_path / "back")


# What is converted


def test_a_part_is_named_and_the_towers_stay_softmax(sources):
    model = load(str(sources("composite_llava")))
    made = plan(model, "ssmax")
    assert made.part == "text_config" and "llava (text_config) to ssmax" in str(made)
    assert all(name.startswith("model.language_model.") for name in made.converted)
    assert len(made.kept) == 2 and all("vision_tower" in name for name in made.kept)
    apply(model, made)
    assert model.config.text_config._attn_implementation == "ssmax"
    assert model.config.vision_config._attn_implementation == "sdpa"
    revert(model)
    assert configuration.find_section(model.config) is None
    assert model.config.text_config._attn_implementation == "sdpa"


def test_what_was_not_converted_keeps_its_attention(sources):
    """Going back to softmax sets no part that did not run ours; some know no sdpa."""
    wanted = {"text_config": "sdpa", "vision_config": "eager"}
    model = transformers.LlavaForConditionalGeneration.from_pretrained(
        sources("composite_llava"), attn_implementation=wanted
    )
    apply(model, plan(model, "ssmax"))
    revert(model)
    names = {part: getattr(model.config, part)._attn_implementation for part in wanted}
    assert names == wanted


def test_a_tower_is_calibrated_on_inputs_of_its_own(sources, tmp_path):
    """Text does not get there: `convert` says so, in Python other inputs can be given."""
    source = sources("composite_llava")
    with pytest.raises(ValueError, match=r"text never gets to model.vision_tower.*self_attn"):
        convert(source, tmp_path / "out", "sigmoid", part="vision_config", **SMALL)
    with pytest.raises(ValueError, match=r"text never gets to model.vision_tower.*self_attn"):
        convert(source, tmp_path / "out", "ssmax", part="vision_config", **SMALL)
    assert not [*tmp_path.iterdir()]
    model = load(str(source))
    ids = text_ids()
    ids[:, 2:6] = 259  # four patches
    batch = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16)}
    fits = calibrate(model, [batch], query=True, part="vision_config", progress=False)
    # llava takes the last but one layer's states, so that the last module is reached all the same.
    made = plan(model, "sigmoid", part="vision_config")
    assert set(fits) == set(made.converted)
    apply(model, made, fits)
    assert {m.config._attn_implementation for _, m in parameters.holders(model)} == {"sigmoid"}
    assert model.config.text_config._attn_implementation == "sdpa"


def test_layers_of_an_encoder_decoder_are_those_of_both_stacks(tmp_path):
    cls = transformers.T5ForConditionalGeneration
    releases.skip_if_refused(cls)
    source = save(cls(transformers.T5Config(**T5, num_decoder_layers=3)), tmp_path / "source")
    model = load(str(source))
    both = plan(model, "ssmax", layers=[0]).converted
    assert [name.split(".")[0] for name in both] == ["encoder", "decoder", "decoder"]
    deepest = plan(model, "ssmax", layers=[2]).converted
    assert deepest and all(name.startswith("decoder.block.2.") for name in deepest)
    with pytest.raises(ValueError, match="layers must be indices from 0 to 2, got 3"):
        convert(source, tmp_path / "out", "ssmax", layers=[3], **SMALL)
    report = convert(source, tmp_path / "out", "sigmoid", layers="!0-1", **SMALL)
    assert report["plan"]["converted"] == list(deepest) == list(report["modules"])


def test_calibration_sees_packed_documents_as_attention_does(sources):
    """The recorder reads transformers' arguments as the two functions do: lengths in the call."""
    model = load(str(sources("grouped")))
    first, second = text_ids()[:1, :10], text_ids()[1:, :14]
    lengths = torch.tensor([0, 10, 24], dtype=torch.int32)
    packed = {
        "input_ids": torch.cat([first, second], 1),
        "cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 14, "max_length_k": 14,
    }  # fmt: skip
    together, apart = (
        calibrate(model, batches, progress=False)  # not on queries, which RoPE turns on further
        for batches in ([packed], [first, second])
    )
    for name, fit in together.items():
        torch.testing.assert_close(fit.residual, apart[name].residual, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(fit.offset, apart[name].offset, atol=1e-3, rtol=1e-3)


def test_runs_are_those_of_the_kind(sources):
    """An encoder-decoder's steps with a cache are its logits at once, and padding is not read."""
    for kind in ("seq2seq_t5", "seq2seq_bart", "composite_llava"):
        found = runs(load(str(sources(kind))), text_ids())
        close = {"atol": 1e-3, "rtol": 1e-3}
        torch.testing.assert_close(found["decoded with a cache"], found["plain"], **close)
        assert found["padded"].shape[0] < found["plain"].shape[0] or "seq2seq" in kind


def spread_of(source: Path, share: float = 0.6) -> dict:
    """Memory for part of a model."""
    bytes_ = sum(tensor.nbytes for tensor in tensors(source).values())
    return {"device_map": "auto", "max_memory": {"cpu": int(share * bytes_)}}


# Of "latent" the checkpoint has experts one by one. With 0.6 no part of "tied" stays in memory.
@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("grouped", 0.6),
        ("tied", 0.8),
        pytest.param("tied", 0.6, marks=releases.needs("5.15", "a model that is all on the disk")),
        pytest.param("latent", 0.6, marks=releases.needs("5.14", "saving such pieces")),
        ("bfloat16", 0.6),
        ("seq2seq_t5", 0.6),
    ],
)
def test_offloaded_weights_are_converted_and_all_written(sources, tmp_path, kind, share):
    """Memory for part of the model, the rest on the disk: the same checkpoint to the last bit."""
    source = sources(kind)
    spread = spread_of(source, share)
    model = load(str(source), **spread, offload_near=tmp_path)
    assert "disk" in model.hf_device_map.values()
    assert any(p.is_meta for p in model.parameters())
    model.save_pretrained(tmp_path / "softmax")
    options = {"init": "calibrated-query", **SMALL}
    whole = convert(source, tmp_path / "whole", "sigmoid", **options)
    parts = convert(source, tmp_path / "parts", "sigmoid", **spread, **options)
    assert whole["weights_sha256"] == parts["weights_sha256"]
    assert whole["modules"] == parts["modules"]
    assert_same_checkpoint(tmp_path / "whole", tmp_path / "parts")
    assert revert_checkpoint(tmp_path / "parts", tmp_path / "back", device_map="auto")
    assert_same_checkpoint(source, tmp_path / "back")


def test_weights_that_a_release_cannot_write_from_the_disk_are_refused(
    sources, tmp_path, monkeypatch
):
    monkeypatch.setattr(compat, "RELEASE", Version("5.13"))
    grouped, latent, tied = (sources(kind) for kind in ("grouped", "latent", "tied"))
    with pytest.raises(ValueError, match=r"written from the disk by transformers 5\.14 or newer"):
        convert(latent, tmp_path / "out", "ssmax", **spread_of(latent), **SMALL)
    with pytest.raises(ValueError, match=r"on the disk as a whole, which needs transformers 5\.15"):
        convert(tied, tmp_path / "out", "ssmax", **spread_of(tied), **SMALL)
    assert not (tmp_path / "out").exists()
    convert(grouped, tmp_path / "out", "ssmax", **spread_of(grouped), **SMALL)


def test_command_line_takes_a_part_and_a_device_map(sources, tmp_path, capsys):
    source, out = str(sources("composite_llava")), str(tmp_path / "out")
    options = ["--to", "ssmax", "--window", "24", "--windows", "2"]
    spread = ["--part", "text_config", "--device-map", "auto"]
    assert main(["convert", source, out, *options, *spread]) == 0
    capsys.readouterr()
    assert main(["inspect", out, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["attention"] == "ssmax" and said["part"] == "text_config"
    assert main(["verify", out, "--against", source, "--lengths", "24"]) == 0
    assert main(["convert", source, "--to", "ssmax", "--dry-run", "--part", "vision_config"]) == 0
    assert "llava (vision_config) to ssmax" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["masked_bert", "features_clip", "seq2seq_bart"])
def test_verify_compares_every_kind(sources, tmp_path, capsys, kind):
    convert(sources(kind), tmp_path / "out", "ssmax", **SMALL)
    capsys.readouterr()
    verify = ["verify", str(tmp_path / "out"), "--against", str(sources(kind)), "--lengths", "16"]
    assert main([*verify, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metric"] == METRICS[kind.split("_")[0]]
    before, after = found["perplexity"]["16"]
    assert after == pytest.approx(before, abs=1e-5)
    assert (before == 0) == (kind == "features_clip")


# What is refused


@pytest.mark.parametrize("kind", ["grouped", "masked_bert", "seq2seq_t5", "composite_llava"])
@pytest.mark.parametrize("which", ["calibration", "evaluation"])
def test_a_text_shorter_than_a_window_is_named(sources, tmp_path, kind, which, monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)  # before any work
    (tmp_path / "short.txt").write_text("ten tokens")
    message = f"the {which} text must have at least 24 tokens, got 10, less than one window"
    with pytest.raises(ValueError, match=message):
        convert(
            sources(kind), tmp_path / "out", "sigmoid", **{which: tmp_path / "short.txt"}, **SMALL
        )
    assert not (tmp_path / "out").exists()


def refused(tmp_path):
    """Model, arguments of `convert`, and what it says."""
    llama4 = {**LLAMA4, "attn_temperature_tuning": True}
    gpt_oss = {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1, **SLIDING}
    t5 = {**T5, "decoder_start_token_id": 0}
    return {
        "scaled": ("Llama4ForCausalLM", llama4, {}, "llama4_text already scales its logits"),
        "sinks": ("GptOssForCausalLM", gpt_oss, {"function": "sigmoid"}, "has attention sinks"),
        "sound": ("WhisperForConditionalGeneration", tiny_models.config("whisper").to_dict(), {},
                  "must read text, got Whisper.*, which reads input_features"),
        "tower": ("Qwen3VLVisionModel", {"depth": 1, "hidden_size": 32, "num_heads": 4}, {},
                  "must read text, got Qwen3VLVisionModel, which reads hidden_states"),
        "no_text": ("DbrxForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 1}, {},
                    r"'dbrx' has parts \(attn_config, ffn_config\) and none of them is its text"),
        "no_part": ("LlavaForConditionalGeneration", LLAVA, {"part": "audio_config"},
                    PART + ", got 'audio_config'"),
        "no_parts": ("LlamaForCausalLM", GROUPED, {"part": "text_config"},
                     "--part: 'llama' has no parts, got 'text_config'"),
        "part_layer": ("LlavaForConditionalGeneration", LLAVA, {"layers": [2]},
                       "layers must be indices from 0 to 1, got 2"),
        "decoder_layer": ("T5ForConditionalGeneration", t5, {"layers": "0,5"},
                          "layers must be indices from 0 to 1, got 5"),
        "positions": ("RobertaForMaskedLM", SIZES, {"window": 64},
                      "window must be at most the model's 63 positions, got 64"),
    }  # fmt: skip


@pytest.mark.parametrize("case", refused(Path()))
def test_a_model_or_a_part_that_cannot_be_converted_is_named(tmp_path, case):
    name, fields, change, message = refused(tmp_path)[case]
    cls = getattr(transformers, name)
    config = cls.config_class(**fields)
    config.architectures = [name]
    config.save_pretrained(tmp_path / "source")  # no weights: it is refused before they are read
    save_tokenizer(tmp_path / "source")
    with pytest.raises(ValueError, match=message):
        convert(**{"source": tmp_path / "source", "target": tmp_path / "out", "function": "ssmax",
                   **SMALL, **change})  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_a_converted_part_is_not_converted_again(sources, tmp_path):
    convert(sources("composite_llava"), tmp_path / "out", "ssmax", **SMALL)
    with pytest.raises(ValueError, match="already converted to ssmax"):
        convert(tmp_path / "out", tmp_path / "again", "sigmoid", **SMALL)
    assert not (tmp_path / "again").exists()


def test_weights_that_the_checkpoint_lacks_are_not_made_up(sources, tmp_path):
    model = load(str(sources("masked_bert")))
    save(model.base_model, tmp_path / "source")
    assert model_class(model.base_model.config).__name__ == "BertModel"
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config["architectures"] = ["BertForMaskedLM"]
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"lacks \d+ weights of BertForMaskedLM, which would be"):
        convert(tmp_path / "source", tmp_path / "out", "ssmax", **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_model_that_needs_more_than_text_says_so(tmp_path):
    releases.skip_if_refused(transformers.UdopForConditionalGeneration)
    config = transformers.UdopConfig(**T5, decoder_start_token_id=0)
    source = save(transformers.UdopForConditionalGeneration(config), tmp_path / "source")
    with pytest.raises(
        ValueError, match="cannot be run on text alone: ValueError: Bbox is required"
    ):
        convert(source, tmp_path / "out", "ssmax", **SMALL)
    assert not (tmp_path / "out").exists()


def test_a_masked_model_needs_a_mask_token(sources, tmp_path):
    load(str(sources("masked_bert"))).save_pretrained(tmp_path / "source")
    tiny_models.byte_tokenizer().save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="BertForMaskedLM predicts masked tokens"):
        convert(tmp_path / "source", tmp_path / "out", "ssmax", **SMALL)
