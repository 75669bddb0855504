"""What a command is not asked to change leaves as it came: tensors, companions, tied weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from huggingface_hub import metadata_load
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from training_runs import arguments
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    CLIPImageProcessor,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    MixtralConfig,
)

from hf_sigmoid.training import train  # isort: skip
from hf_sigmoid.training import distil  # isort: skip
from hf_sigmoid.checkpoint_files import files_sha256
from hf_sigmoid.conversions import convert, merging
from hf_sigmoid.conversions.merging import merge_adapter
from hf_sigmoid.conversions.revert import revert_checkpoint

SMALL = {"window": 32, "windows": 4, "progress": False}


def llama(folder: Path, **more) -> Path:
    """A random llama that reads bytes, as a checkpoint."""
    tokenizer = tiny_models.byte_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.2, eos_token_id=tokenizer.eos_token_id, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def mix(folder: Path) -> dict[str, torch.Tensor]:
    """Make a checkpoint's files bfloat16 but for its norms and head; its tensors."""
    torch.manual_seed(1)
    files = sorted(folder.glob("*.safetensors"))
    found = {}
    for file in files:
        tensors = {}
        for name, tensor in load_file(file).items():
            wide = "norm" in name or "lm_head" in name
            tensors[name] = tensor + 0.1 * torch.randn_like(tensor) if wide else tensor.bfloat16()
        save_file(tensors, file, {"format": "pt"})
        found |= tensors
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return found


@pytest.fixture
def mixed(tmp_path) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = llama(tmp_path / "mixed")
    return folder, mix(folder)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        if file.name.startswith("model"):
            found |= load_file(file)
    return found


def assert_as_they_came(folder: Path, came: dict[str, torch.Tensor], but: tuple[str, ...] = ()):
    found = tensors_of(folder)
    for name, tensor in came.items():
        if not any(part in name for part in but):
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("function", ["ssmax", "sigmoid"])
@pytest.mark.parametrize("shards", [False, True], ids=["one_file", "shards"])
def test_a_checkpoint_of_mixed_dtypes_is_converted_and_reverted_bit_for_bit(
    tmp_path, function, shards
):
    source = llama(tmp_path / "mixed")
    if shards:
        model = AutoModelForCausalLM.from_pretrained(source)
        (source / "model.safetensors").unlink()
        model.save_pretrained(source, max_shard_size="20KB")
        assert len(list(source.glob("*.safetensors"))) > 2
    came = mix(source)
    report = convert(source, tmp_path / "out", function, **SMALL)
    assert_as_they_came(tmp_path / "out", came)
    assert revert_checkpoint(tmp_path / "out", tmp_path / "back")
    assert_as_they_came(tmp_path / "back", came)
    assert tensors_of(tmp_path / "back").keys() == came.keys()
    assert files_sha256(tmp_path / "back") == files_sha256(source) == report["files_sha256"]
    index = tmp_path / "out" / "model.safetensors.index.json"
    if shards:
        total = json.loads(index.read_text())["metadata"]["total_size"]
        assert total == sum(t.nbytes for t in tensors_of(tmp_path / "out").values())


def dtype_of(folder: Path) -> str | None:
    return json.loads((folder / "config.json").read_text()).get("dtype")


@pytest.mark.parametrize("named", ["bfloat16", None])
def test_a_model_whose_weights_are_fused_keeps_its_dtypes_too(tmp_path, named):
    """transformers calls the experts' weights otherwise; the router's are float32."""
    source = tmp_path / "moe"
    tokenizer = tiny_models.byte_tokenizer()
    tokenizer.save_pretrained(source)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = MixtralConfig(
        vocab_size=len(tokenizer), num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, max_position_embeddings=128, **sizes,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(source)
    file = source / "model.safetensors"
    came = {k: v if "gate." in k else v.bfloat16() for k, v in load_file(file).items()}
    assert len({tensor.dtype for tensor in came.values()}) == 2
    save_file(came, file, {"format": "pt"})
    content = json.loads((source / "config.json").read_text())
    content.pop("dtype", None)
    (source / "config.json").write_text(
        json.dumps({**content, **({"dtype": named} if named else {})})
    )
    convert(source, tmp_path / "out", "ssmax", **SMALL)
    assert revert_checkpoint(tmp_path / "out", tmp_path / "back")
    for name in ("out", "back"):
        assert_as_they_came(tmp_path / name, came)
        assert dtype_of(tmp_path / name) == named


@pytest.mark.parametrize("shards", [False, True], ids=["one_file", "shards"])
def test_weights_that_the_model_has_no_place_for_are_kept(tmp_path, shards):
    source = llama(tmp_path / "base", tie_word_embeddings=True)
    if shards:
        model = AutoModelForCausalLM.from_pretrained(source)
        (source / "model.safetensors").unlink()
        model.save_pretrained(source, max_shard_size="20KB")
    file = sorted(source.glob("model*.safetensors"))[0]
    more = {"value_head.weight": torch.randn(3, 4).half(), "some.buffer": torch.arange(5)}
    more["lm_head.weight"] = tensors_of(source)["model.embed_tokens.weight"].clone()
    save_file({**load_file(file), **more}, file, {"format": "pt"})
    index = source / "model.safetensors.index.json"
    if shards:
        content = json.loads(index.read_text())
        content["weight_map"] |= dict.fromkeys(more, file.name)
        index.write_text(json.dumps(content))
    came = tensors_of(source)
    convert(source, tmp_path / "out", "ssmax", **SMALL)
    assert revert_checkpoint(tmp_path / "out", tmp_path / "back")
    for name in ("out", "back"):
        assert_as_they_came(tmp_path / name, came)
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name)
    assert files_sha256(tmp_path / "back") == files_sha256(source)


def test_a_float32_tensor_that_was_trained_less_than_bfloat16_sees_is_noticed(mixed, tmp_path):
    source, _ = mixed
    convert(source, tmp_path / "out", "ssmax", **SMALL)
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] *= 1 + 1e-6
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match="trained since the conversion"):
        revert_checkpoint(tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_an_adapter_changes_only_what_it_adapts(mixed, tmp_path):
    source, came = mixed
    convert(source, tmp_path / "out", "ssmax", **SMALL)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    adapted(model, config).save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "out", tmp_path / "merged")
    assert_as_they_came(tmp_path / "merged", came, but=("q_proj", "lm_head"))
    assert dtype_of(tmp_path / "merged") == "bfloat16"
    found = tensors_of(tmp_path / "merged")
    for name in ("model.layers.0.self_attn.q_proj.weight", "lm_head.weight"):
        assert found[name].dtype == came[name].dtype and not torch.equal(found[name], came[name])


def test_a_final_model_has_what_was_frozen_as_it_came(mixed, tmp_path, corpus_file):
    source, came = mixed
    convert(source, tmp_path / "out", "ssmax", **SMALL)
    keys = {"train.steps": 2, "train.parameters": "log_length", "checkpoint.every": 0}
    given = arguments(str(tmp_path / "out"), corpus_file, tmp_path / "run", **keys)
    final = train.main(given)
    assert_as_they_came(final, came)
    assert dtype_of(final) == "bfloat16"
    assert revert_checkpoint(final, tmp_path / "back")
    assert_as_they_came(tmp_path / "back", came)


def test_a_distilled_model_has_what_was_not_trained_as_it_came(mixed, tmp_path, corpus_file):
    source, came = mixed
    convert(source, tmp_path / "out", "sigmoid", **SMALL)
    given = [
        f"model={tmp_path / 'out'}", f"output_dir={tmp_path / 'run'}", f"data.path={corpus_file}",
        "train.block_size=32", "layerwise.steps=2", "checkpoint.every=0",
    ]  # fmt: skip
    final = distil.main(given)
    # Gains and temperatures are folded into these.
    assert_as_they_came(final, came, but=("q_proj", "o_proj"))
    assert revert_checkpoint(final, tmp_path / "back")
    assert_as_they_came(tmp_path / "back", came)


def adapted(model, config: LoraConfig):
    """A model with adapters that do something."""
    model = get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += 0.2 * noise.to(parameter.dtype)
    return model


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"target_modules": ["q_proj", "embed_tokens"]}, id="input"),
        pytest.param({"target_modules": ["q_proj", "lm_head"]}, id="output"),
        pytest.param({"target_modules": ["embed_tokens", "lm_head"]}, id="both"),
        pytest.param(
            {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, id="saved_input"
        ),
        pytest.param(
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, id="saved_output"
        ),
        pytest.param({"target_modules": ["q_proj", "v_proj"]}, id="neither"),
    ],
)
def test_an_adapter_on_tied_embeddings_is_merged_as_it_ran(tmp_path, options):
    base = llama(tmp_path / "base", tie_word_embeddings=True)
    convert(base, tmp_path / "out", "ssmax", **SMALL)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model = adapted(model, LoraConfig(r=2, task_type="CAUSAL_LM", **options))
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        wanted = model(ids).logits
    model.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "out", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        found = merged(ids).logits
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    touches = "embed" in str(options) or "head" in str(options)
    assert merged.config.tie_word_embeddings is not touches


def test_a_merged_model_of_other_logits_is_not_written(tmp_path, monkeypatch):
    base = llama(tmp_path / "base", tie_word_embeddings=True)
    config = LoraConfig(r=2, target_modules=["embed_tokens"], task_type="CAUSAL_LM")
    adapted(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "a")
    monkeypatch.setattr(merging, "merge", lambda model: model.merge_and_unload())
    with pytest.raises(ValueError, match="must compute what base and adapter do"):
        merge_adapter(tmp_path / "a", base, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "base"]


def test_an_adapter_of_a_larger_vocabulary_is_told_the_remedy(tmp_path):
    base = llama(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    rows = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(rows + 3)
    config = LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM"
    )
    adapted(model, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError) as error:
        merge_adapter(tmp_path / "adapter", base, tmp_path / "merged")
    said = str(error.value)
    assert f"has {rows + 3} rows, expected {rows}" in said
    assert f"resize_token_embeddings({rows + 3})" in said and "--base" in said


def test_a_run_with_adapters_ends_in_the_model_that_it_trained(tmp_path, corpus_file):
    base = llama(tmp_path / "base", tie_word_embeddings=True)
    keys = {"train.steps": 3, "lora.rank": 2, "lora.targets": "all-linear", "attn": "ssmax"}
    final = train.main(arguments(str(base), corpus_file, tmp_path / "run", **keys))
    from peft import PeftModel

    plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="ssmax")
    both = PeftModel.from_pretrained(plain, str(final / "adapter")).eval()
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        wanted = both(ids).logits
        found = AutoModelForCausalLM.from_pretrained(final).eval()(ids).logits
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.fixture
def companions(tmp_path) -> Path:
    """A llava with a processor, templates, settings, and a pooling module of its own."""
    folder = tmp_path / "llava"
    tokenizer = tiny_models.byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    text = {
        "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }  # fmt: skip
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=257)
    model = LlavaForConditionalGeneration(config)
    model.generation_config = GenerationConfig(max_new_tokens=7, eos_token_id=256)
    model.save_pretrained(folder)
    image = CLIPImageProcessor(size={"shortest_edge": 16})
    processor = LlavaProcessor(image, tokenizer, patch_size=4)
    processor.chat_template = "{{ messages[0]['content'] }}"
    processor.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(image.to_json_string())
    (folder / "LICENSE.txt").write_text("terms")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "2_Dense").mkdir()
    save_file({"linear.weight": torch.ones(2, 2)}, folder / "2_Dense/model.safetensors")
    (folder / "modules.json").write_text(
        json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": "../x"}])
    )
    for name in ("optimizer.pt", "training_args.bin", ".hidden.json", "trainer_state.json"):
        (folder / name).write_text("not of the model")
    return folder


GO_ALONG = (
    "chat_template.jinja", "generation_config.json", "preprocessor_config.json", "LICENSE.txt",
    "modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors",
)  # fmt: skip


def test_what_goes_with_a_model_goes_with_it_in_every_verb(companions, tmp_path):
    convert(companions, tmp_path / "out", "ssmax", **SMALL)
    revert_checkpoint(tmp_path / "out", tmp_path / "back")
    model = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out")
    config = LoraConfig(r=2, target_modules=r".*language_model.*q_proj")
    adapted(model, config).save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "out", tmp_path / "merged")
    for name in ("out", "back", "merged"):
        folder = tmp_path / name
        AutoProcessor.from_pretrained(folder)
        for file in GO_ALONG:
            # transformers writes the generation settings anew, with its release.
            if file != "generation_config.json":
                assert (folder / file).read_bytes() == (companions / file).read_bytes(), file
        settings = GenerationConfig.from_pretrained(folder)
        assert settings.max_new_tokens == 7 and settings.eos_token_id == 256
        strangers = {"optimizer.pt", "training_args.bin", ".hidden.json", "trainer_state.json"}
        assert not strangers & {path.name for path in folder.iterdir()}


def test_what_goes_with_a_model_goes_into_final_too(tmp_path, corpus_file):
    source = llama(tmp_path / "base")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "preprocessor_config.json").write_text("{}")
    convert(source, tmp_path / "out", "sigmoid", **SMALL)
    keys = {"train.steps": 1, "checkpoint.every": 0}
    run = arguments(str(tmp_path / "out"), corpus_file, tmp_path / "run", **keys)
    distilled = [
        f"model={tmp_path / 'out'}", f"output_dir={tmp_path / 'd'}", f"data.path={corpus_file}",
        "train.block_size=32", "layerwise.steps=1", "checkpoint.every=0",
    ]  # fmt: skip
    for final in (train.main(run), distil.main(distilled)):
        assert (final / "preprocessor_config.json").read_text() == "{}"
        assert AutoTokenizer.from_pretrained(final).chat_template == "{{ messages }}"


def test_the_card_of_a_final_model_has_base_and_figures(tmp_path, corpus_file):
    """Of a hub's model that was converted into a folder here."""
    source = llama(tmp_path / "base")
    convert(source, tmp_path / "out", "sigmoid", **SMALL)
    report = json.loads((tmp_path / "out/report.json").read_text())
    report["base"]["model"] = "someone/model"
    (tmp_path / "out/report.json").write_text(json.dumps(report))
    keys = {"train.steps": 2, "checkpoint.every": 0}
    run = arguments(str(tmp_path / "out"), corpus_file, tmp_path / "run", **keys)
    final = train.main(run)
    assert metadata_load(final / "README.md")["base_model"] == "someone/model"
    card = (final / "README.md").read_text("utf-8")
    losses = [json.loads(x)["loss"] for x in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert f"| loss of a step (nats a token) | {losses[0]:.3f} | {losses[-1]:.3f} |" in card
    assert f"perplexity on 32 tokens: {report['perplexity_before']:.3f} before" in card
    assert "pip install" in card and "import hf_sigmoid" in card and "(vLLM, SGLang, TGI)" in card


@pytest.mark.parametrize("function", ["ssmax", "sigmoid"])
def test_a_locale_that_is_not_utf8_changes_nothing(tmp_path, function):
    source = llama(tmp_path / "base")
    command = [
        sys.executable, "-m", "hf_sigmoid.conversions", "convert", str(source),
        str(tmp_path / "out"), "--to", function, "--window", "32", "--windows", "2",
        "--evaluate", "builtin",
    ]  # fmt: skip
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    ran = subprocess.run(command, capture_output=True, env={**os.environ, **ascii_only})
    assert ran.returncode == 0, ran.stderr
    assert not (tmp_path / "out/report.md").read_text("utf-8").isascii()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    verbs = {
        "--help": [], "convert": ["--help"], "inspect": [str(tmp_path / "out")],
        "revert": [str(tmp_path / "out"), str(tmp_path / "back")],
        "eval": ["--models", str(source), "--lengths", "256", "--samples", "1", "--depths", "0.5",
                 "--decoys", "1", "--out", str(tmp_path / "eval")],
    }  # fmt: skip
    for verb, words in verbs.items() if function == "ssmax" else ():
        command = [sys.executable, "-m", "hf_sigmoid.conversions", verb, *words]
        ran = subprocess.run(command, capture_output=True, env={**os.environ, **ascii_only})
        assert ran.returncode == 0, (verb, ran.stderr)
