"""Holders and the config's section: attached, saved, loaded, refused when they disagree."""

import copy
import functools
import json
import math
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import releases
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GPT2Config,
    Llama4TextConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import hf_sigmoid
from hf_sigmoid import parameters, support

FUNCTIONS = ("sigmoid", "ssmax")
every_function = pytest.mark.parametrize("function", FUNCTIONS)


def test_ssmax_by_name_is_the_identity_and_ready_to_learn(tmp_path):
    """`attn_implementation="ssmax"` on a softmax checkpoint: no garbage in new parameters."""
    softmax = tiny_models.build("llama")
    softmax.save_pretrained(tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="ssmax", output_loading_info=True
    )
    new = {name: p for name, p in model.named_parameters() if "log_length" in name}
    assert sorted(info["missing_keys"]) == sorted(new) and len(new) == 4
    assert all(
        p.requires_grad and p.dtype == torch.float32 and p.shape == (4,) for p in new.values()
    )
    assert all((p == (1.0 if name.endswith("offset") else 0.0)).all() for name, p in new.items())
    ids = tiny_models.tokens()
    assert torch.equal(
        tiny_models.output(model, input_ids=ids), tiny_models.output(softmax, input_ids=ids)
    )


@every_function
def test_save_and_load_in_a_fresh_process(tmp_path, function):
    """Told nothing but the path, plain transformers and one import give the same logits."""
    model = tiny_models.converted("llama", function)
    ids = tiny_models.tokens()
    model.save_pretrained(tmp_path)
    save_file(
        {"logits": tiny_models.output(model, input_ids=ids), "ids": ids},
        tmp_path / "expected.safetensors",
    )
    names = [name for name in load_file(tmp_path / "model.safetensors") if "log_length" in name]
    assert len(names) == (8 if function == "sigmoid" else 4)
    code = (
        "import sys, torch, hf_sigmoid\n"
        "from safetensors.torch import load_file\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()\n"
        "expected = load_file(sys.argv[1] + '/expected.safetensors')\n"
        "with torch.no_grad():  # as the expected ones\n"
        "    assert torch.equal(model(expected['ids']).logits, expected['logits'])\n"
        "print(model.config._attn_implementation)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [function]


@every_function
def test_resaving_keeps_everything(tmp_path, function):
    model = tiny_models.converted("llama", function)
    for step in ("a", "b"):
        model.save_pretrained(tmp_path / step)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / step)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["attn_implementation"] == function == config["hf_sigmoid"]["function"]
    a, b = (load_file(tmp_path / step / "model.safetensors") for step in ("a", "b"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_holders_stay_float32_in_a_bfloat16_model(tmp_path):
    tiny_models.converted("llama", "ssmax").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    dtypes = {("log_length" in name, p.dtype) for name, p in model.named_parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


def test_frozen_numbers_stay_frozen_after_loading(tmp_path):
    model = tiny_models.build("llama")
    hf_sigmoid.configure(model, "sigmoid", query=True)
    model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    trained = {"log_length" in name: p.requires_grad for name, p in model.named_parameters()}
    assert trained == {True: False, False: True}


@every_function
def test_run_time_switching_and_back(function):
    model, ids = tiny_models.build("llama"), tiny_models.tokens()
    softmax = tiny_models.output(model, input_ids=ids)
    model.set_attn_implementation(function)
    assert bool(list(parameters.holders(model)))
    switched = tiny_models.output(model, input_ids=ids)
    assert torch.equal(switched, softmax) == (function == "ssmax")
    hf_sigmoid.configure(model, "softmax")
    assert not list(parameters.holders(model)) and model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "hf_sigmoid")
    assert torch.equal(tiny_models.output(model, input_ids=ids), softmax)


def test_configure_sets_what_the_papers_ask_for():
    config = tiny_models.config("llama")
    hf_sigmoid.configure(config, "ssmax", offset=0.0, slope="paper", learn=True)
    mean = sum(math.log(n) for n in range(1, 65)) / 64
    model = AutoModelForCausalLM.from_config(config)
    holder = model.model.layers[1].self_attn.log_length
    assert holder.offset.tolist() == [0.0] * 4
    torch.testing.assert_close(holder.slope, torch.full((4,), 1 / mean))
    row = holder(torch.log(torch.tensor([[[1.0, 10.0]]])), torch.zeros(1, 4, 2, 8))
    torch.testing.assert_close(row[0, 0], torch.tensor([0.0, math.log(10) / mean]))

    config = tiny_models.config("llama")
    hf_sigmoid.configure(config, "sigmoid", offset=[-math.log(64)] * 4, slope=0.0)
    model = AutoModelForCausalLM.from_config(config)
    assert not any("log_length" in name for name, _ in model.named_parameters())
    row = model.model.layers[0].self_attn.log_length(torch.zeros(1, 1, 3), torch.zeros(1, 4, 3, 8))
    torch.testing.assert_close(row.expand(1, 4, 3), torch.full((1, 4, 3), -math.log(64)))


@pytest.mark.parametrize("target", ["model", "config"])
@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"function": "sigmod"}, "function must be 'sigmoid', 'ssmax' or 'softmax', got 'sigmod'"),
        ({"function": "ssmax", "offset": float("nan")}, "offset must be finite, got nan"),
        (
            {"function": "ssmax", "slope": [1.0, 2.0]},
            "slope must be a float or 4 floats, one a head, got '2 values'",
        ),
        (
            {"function": "ssmax", "slope": "papr"},
            "slope must be a float or 4 floats, one a head, got 'papr'",
        ),
        ({"function": "sigmoid", "layers": [2]}, "layers must be indices from 0 to 1, got 2"),
        ({"function": "softmax", "learn": True}, "softmax takes no offset"),
        ({"function": "sigmoid", "slope": "paper"}, "slope='paper' is SSMax's, got it for sigmoid"),
        ({"function": "ssmax", "offset": torch.ones(4, 1)}, "offset must be a float or 4 floats"),
        ({"function": "ssmax", "layers": [0.5]}, "layers must be indices from 0 to 1, got 0.5"),
        ({"function": "ssmax", "layers": "01"}, "layers must be indices from 0 to 1, got '0'"),
    ],
)
def test_bad_values_are_named_and_change_nothing(target, arguments, message):
    thing = tiny_models.build("llama") if target == "model" else tiny_models.config("llama")
    with pytest.raises(ValueError, match=message):
        hf_sigmoid.configure(thing, **arguments)
    config = thing.config if target == "model" else thing
    assert not getattr(config, "hf_sigmoid", None) and config._attn_implementation in (None, "sdpa")


def test_numbers_for_each_head_need_one_number_of_heads():
    sizes = {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "d_model": 32}
    config = WhisperConfig(
        **sizes, encoder_layers=1, decoder_layers=1, vocab_size=99, pad_token_id=0
    )
    model = WhisperForConditionalGeneration(config)
    with pytest.raises(ValueError, match="offset must be a float or 2 or 4 floats"):
        hf_sigmoid.configure(model, "sigmoid", offset=[1.0] * 4)
    assert not list(parameters.holders(model)) and not hasattr(config, "hf_sigmoid")
    with pytest.raises(ValueError, match=r"needs config.max_position_embeddings .* got None"):
        hf_sigmoid.configure(config, "ssmax", slope="paper")


def test_an_unknown_parameter_name_is_an_error():
    with pytest.raises(TypeError, match="slop"):
        hf_sigmoid.configure(tiny_models.config("llama"), "ssmax", slop=1.0)


@every_function
@pytest.mark.parametrize("config", [BloomConfig, FalconConfig], ids=["bloom", "falcon"])
def test_a_model_off_the_interface_is_refused_by_name(config, function):
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    name = config.__name__.removesuffix("Config")
    with pytest.raises(
        ValueError, match=f"{name}.* does not go through transformers' attention interface"
    ):
        AutoModelForCausalLM.from_config(config(**sizes), attn_implementation=function)
    assert (
        AutoModelForCausalLM.from_config(config(**sizes)).config._attn_implementation
        not in FUNCTIONS
    )
    if config is BloomConfig:
        with pytest.raises(ValueError, match="does not go through"):
            hf_sigmoid.configure(AutoModelForCausalLM.from_config(config(**sizes)), function)


def test_a_model_that_turns_its_mask_around_is_refused():
    with pytest.raises(hf_sigmoid.Unsupported, match="gemma4_assistant turns its attention mask"):
        support.refuse_own_masks(SimpleNamespace(model_type="gemma4_assistant"), "ssmax")


def test_ssmax_does_not_scale_twice():
    config = Llama4TextConfig(attn_temperature_tuning=True)
    with pytest.raises(ValueError, match=r"llama4_text already scales.*attn_temperature_tuning"):
        support.refuse_scaled_twice(config, "ssmax")
    config.attn_temperature_tuning = False
    support.refuse_scaled_twice(config, "ssmax")


def checkpoint(folder, function="ssmax"):
    tiny_models.converted("llama", function).save_pretrained(folder)
    return folder


def test_a_checkpoint_that_lacks_its_parameters_is_refused(tmp_path):
    path = checkpoint(tmp_path) / "model.safetensors"
    tensors = {
        name: t
        for name, t in load_file(path).items()
        if "layers.1.self_attn.log_length" not in name
    }
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(
        ValueError,
        match=r"lacks parameters that its config.json names: .*layers\.1\.self_attn\.log_length",
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("section", ["absent", "sigmoid_without_parameters"])
def test_parameters_that_the_section_does_not_know_are_refused(tmp_path, section):
    path = checkpoint(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    if section == "absent":
        del config["hf_sigmoid"], config["attn_implementation"]
    else:
        config["hf_sigmoid"]["parameters"] = []
    path.write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"has parameters that its .*layers\.0\.self_attn\.log_length\.offset"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"version": 2}, "version 1, got 2"),
        ({"function": "softplus"}, "got 'softplus'"),
        ({"typo": 1}, "got .*typo"),
    ],
)
def test_a_section_that_cannot_be_read_is_refused(tmp_path, change, message):
    path = checkpoint(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    config["hf_sigmoid"].update(change)
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_another_function_than_the_checkpoints_warns(tmp_path):
    checkpoint(tmp_path)
    with pytest.warns(
        UserWarning, match="converted to 'ssmax' attention and is about to run 'sdpa'"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_config_that_is_not_the_checkpoints_own_is_noticed(tmp_path):
    tiny_models.build("llama").save_pretrained(tmp_path / "softmax")
    softmax = AutoConfig.from_pretrained(tmp_path / "softmax")
    for function in FUNCTIONS:
        model = tiny_models.build("llama")
        hf_sigmoid.configure(model, function, offset=-2.0)  # a constant: no tensor tells of it
        model.save_pretrained(tmp_path / function)
        with pytest.raises(ValueError, match=f"was converted to {function}, and the config"):
            AutoModelForCausalLM.from_pretrained(tmp_path / function, config=softmax)
        with warnings.catch_warnings():  # its own, from this process or read anew
            warnings.simplefilter("error")
            for own in (model.config, AutoConfig.from_pretrained(tmp_path / function)):
                AutoModelForCausalLM.from_pretrained(tmp_path / function, config=own)
    sigmoid = AutoConfig.from_pretrained(tmp_path / "sigmoid")
    with pytest.warns(UserWarning, match="noise under it. Convert it first"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "softmax", config=sigmoid)


def test_softmax_by_name_is_told_what_it_is_called(tmp_path):
    with pytest.raises(ValueError, match="softmax is 'sdpa' or 'eager' here"):
        tiny_models.build("llama", attn_implementation="softmax")
    with pytest.raises(ValueError, match="did you mean 'sigmoid'"):
        hf_sigmoid.configure(tiny_models.build("llama"), "sigmiod")


@pytest.mark.parametrize(("given", "near"), [("sigmiod", "sigmoid"), ("SSMax", "ssmax")])
def test_a_mistyped_function_is_told_the_nearest_and_all(given, near):
    for run in (
        lambda: tiny_models.build("llama", attn_implementation=given),
        lambda: tiny_models.build("llama").set_attn_implementation(given),
    ):
        with pytest.raises(ValueError) as error:
            run()
        said = str(error.value)
        assert f"did you mean {near!r}?" in said and "sigmoid, ssmax, eager" in said


def test_sigmoid_on_softmax_weights_warns_once_and_names_convert(tmp_path):
    tiny_models.build("llama").save_pretrained(tmp_path / "softmax")
    hf_sigmoid.configure(config := AutoConfig.from_pretrained(tmp_path / "softmax"), "sigmoid")
    load = functools.partial(AutoModelForCausalLM.from_pretrained, tmp_path / "softmax")
    said = "noise under it. Convert it first .hf-sigmoid convert"
    for run in (
        lambda: load(attn_implementation="sigmoid"),
        lambda: load(config=config),
        lambda: load().set_attn_implementation("sigmoid"),
        lambda: hf_sigmoid.configure(load(), "sigmoid", slope=-1.0),
    ):
        with pytest.warns(UserWarning, match=said) as warned:
            run()
        assert len(warned) == 1 and warned[0].filename == __file__


def test_sigmoid_where_it_belongs_warns_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tiny_models.converted("llama", "sigmoid")
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        tiny_models.build("gpt2", attn_implementation="sigmoid").set_attn_implementation("sdpa")
        tiny_models.build("gpt2").set_attn_implementation("sigmoid")


def test_a_model_made_to_run_the_other_function_is_saved_as_what_it_ran(tmp_path):
    """Else one trained so would come back as the function that it was not trained with."""
    model = tiny_models.build("llama")
    hf_sigmoid.configure(model, "ssmax")
    model.save_pretrained(tmp_path / "ssmax")
    with pytest.warns(UserWarning, match="about to run 'sigmoid'"):
        other = AutoModelForCausalLM.from_pretrained(
            tmp_path / "ssmax", attn_implementation="sigmoid"
        )
    other.save_pretrained(tmp_path / "other")
    with pytest.warns(UserWarning, match="about to run 'sigmoid'"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    given = tiny_models.inputs("llama")
    first, second = (tiny_models.output(each.eval(), **given) for each in (other, again))
    assert torch.equal(first, second)


def test_configure_reaches_every_copy_of_a_config(tmp_path):
    """The stacks of T5 hold copies of the config."""
    releases.skip_if_refused(T5ForConditionalGeneration)
    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    model = T5ForConditionalGeneration(config).eval()
    hf_sigmoid.configure(model, "sigmoid", offset=-5.0, slope=0.0, learn=True, layers=[1])
    offsets = {n: p for n, p in model.named_parameters() if n.endswith("log_length.offset")}
    assert len(offsets) == 3 and all((p == -5.0).all() for p in offsets.values())
    functions = [module.log_length.function for _, module in parameters.holders(model)]
    assert sorted(functions) == ["sigmoid"] * 3 + ["softmax"] * 3
    model.save_pretrained(tmp_path)
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    ids = {"input_ids": tiny_models.tokens(), "decoder_input_ids": tiny_models.tokens()}
    assert torch.equal(tiny_models.output(model, **ids), tiny_models.output(loaded, **ids))
    hf_sigmoid.configure(model, "softmax")
    assert not any(getattr(part.config, "hf_sigmoid", None) for part in (model, model.encoder))
    for name in ("ssmax", "sdpa"):
        model.set_attn_implementation(name)
        parts = (model, model.encoder, model.decoder)
        assert {part.config._attn_implementation for part in parts} == {name}


@pytest.mark.parametrize("back", ["sdpa", "ssmax"])
def test_trying_a_function_by_name_leaves_no_trace(tmp_path, back):
    model = tiny_models.build("llama")
    model.set_attn_implementation("sigmoid")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.set_attn_implementation(back)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config._attn_implementation == back
    ids = tiny_models.tokens()
    assert torch.equal(
        tiny_models.output(model, input_ids=ids), tiny_models.output(loaded, input_ids=ids)
    )


def test_what_was_learnt_is_not_dropped_with_the_name():
    model = tiny_models.build("llama", attn_implementation="ssmax")
    with torch.no_grad():
        model.model.layers[0].self_attn.log_length.slope.add_(0.1)
    with pytest.warns(UserWarning, match="is about to run 'sdpa'"):
        model.set_attn_implementation("sdpa")
    assert len(list(parameters.holders(model))) == 2


def test_holders_are_float32_in_a_model_made_in_bfloat16():
    config = tiny_models.config("llama")
    hf_sigmoid.configure(config, "sigmoid", offset=-math.log(4096), slope=0.0, learn=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    offset = model.model.layers[0].self_attn.log_length.offset
    torch.testing.assert_close(offset.detach(), torch.full((4,), -math.log(4096)))
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("target", ["model", "config"])
def test_a_composite_model_must_be_configured_by_its_parts(target):
    thing = llava_config()
    if target == "model":
        thing = LlavaForConditionalGeneration._from_config(thing)
    with pytest.raises(
        ValueError, match=r"configure one of them \((vision|text)_config, (vision|text)_config\)"
    ):
        hf_sigmoid.configure(thing, "sigmoid")


def test_a_composite_model_is_taken_back_out_whole(tmp_path):
    model = LlavaForConditionalGeneration._from_config(
        llava_config(), attn_implementation="sigmoid"
    )
    hf_sigmoid.configure(model, "softmax")
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "hf_sigmoid" not in json.dumps(written)
    assert "attn_implementation" not in written


def llava_config():
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    return LlavaConfig(
        vision_config={
            "model_type": "clip_vision_model",
            "image_size": 16,
            "patch_size": 4,
            **vision,
        },
        text_config=tiny_models.config("llama").to_dict(),
        image_token_index=98,
    )


def test_a_dict_chooses_the_function_of_each_part(tmp_path):
    LlavaForConditionalGeneration._from_config(llava_config()).save_pretrained(tmp_path)
    asked = {"text_config": "sigmoid", "vision_config": "ssmax"}
    model = LlavaForConditionalGeneration.from_pretrained(tmp_path, attn_implementation=asked)
    assert model.config._attn_implementation == "sdpa"
    assert model.config.text_config._attn_implementation == "sigmoid"
    assert model.config.vision_config._attn_implementation == "ssmax"
    functions = {name: module.log_length.function for name, module in parameters.holders(model)}
    assert len(functions) == 4
    assert all(
        function == ("ssmax" if "vision_tower" in name else "sigmoid")
        for name, function in functions.items()
    )
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "sdpa"})
    assert model.config.text_config._attn_implementation == "sdpa"


def test_only_one_tower_of_a_composite_model_is_converted(tmp_path):
    model = LlavaForConditionalGeneration._from_config(llava_config()).eval()
    hf_sigmoid.configure(model.model.language_model, "sigmoid", learn=True)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["attn_implementation"]
    assert written == {"": "sdpa", "text_config": "sigmoid", "vision_config": "sdpa"}
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert (
        loaded.config._attn_implementation
        == "sdpa"
        == loaded.config.vision_config._attn_implementation
    )
    assert loaded.config.text_config._attn_implementation == "sigmoid"
    names = [name for name, _ in parameters.holders(loaded)]
    assert len(names) == 2 and all("language_model" in name for name in names)


@every_function
def test_gpt2_and_whisper_round_trip(tmp_path, function):
    """A model without q_proj, and one with cross-attention."""
    for family, count in (("gpt2", 2), ("whisper", 6)):
        model = tiny_models.converted(family, function)
        model.save_pretrained(tmp_path / family)
        loaded = type(model).from_pretrained(tmp_path / family)
        assert len(list(parameters.holders(loaded))) == count
        inputs = tiny_models.inputs(family)
        assert torch.equal(
            tiny_models.output(model, **inputs), tiny_models.output(loaded, **inputs)
        )


def test_the_plugin_changes_nothing_for_others(tmp_path):
    model = AutoModelForCausalLM.from_config(
        GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=99)
    )
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "hf_sigmoid" not in config and "attn_implementation" not in config
    assert AutoConfig.from_pretrained(tmp_path)._attn_implementation is None
    assert (
        not list(parameters.holders(model))
        and "log_length" not in model._keep_in_fp32_modules_strict
    )


# The part that is linear in what the module gets


def test_hidden_reads_what_the_module_gets():
    """b = β + γ log n + w·q + u·x, by hand from x, and nothing of x is kept behind the call."""
    model, seen = tiny_models.converted("llama", "sigmoid"), {}
    module = model.model.layers[1].self_attn
    holder = module.log_length

    def keep(_, args, row):
        seen["row"], seen["x"] = row, args[2]
        seen["without"] = holder.offset.view(1, -1, 1) + holder.slope.view(1, -1, 1) * args[0]
        seen["without"] = seen["without"] + torch.einsum("bhmd,hd->bhm", args[1], holder.query)

    def given(_, args, kwargs):
        seen["given"] = kwargs["hidden_states"]

    hooks = [
        holder.register_forward_hook(keep),
        module.register_forward_pre_hook(given, with_kwargs=True),
    ]
    tiny_models.output(model, input_ids=tiny_models.tokens())
    for hook in hooks:
        hook.remove()
    assert seen["x"] is seen["given"] and not hasattr(module, parameters.INPUTS)
    expected = seen["without"] + (seen["x"] @ holder.hidden.T).transpose(1, 2)
    torch.testing.assert_close(seen["row"], expected)


def test_an_interrupted_call_keeps_no_inputs():
    model = tiny_models.converted("llama", "sigmoid")
    module = model.model.layers[0].self_attn

    def fails(*_):
        raise RuntimeError("out of memory")

    with module.o_proj.register_forward_pre_hook(fails), pytest.raises(RuntimeError):
        model(tiny_models.tokens())
    assert not hasattr(module, parameters.INPUTS)


def test_a_copy_watches_its_own_inputs_and_taking_it_out_ends_that():
    model, ids = tiny_models.converted("llama", "sigmoid"), tiny_models.tokens()
    before = tiny_models.output(model, input_ids=ids)
    twin = copy.deepcopy(model)
    assert torch.equal(tiny_models.output(twin, input_ids=ids), before)
    hf_sigmoid.configure(twin, "softmax")
    for module in (each.self_attn for each in twin.model.layers):
        assert not module._forward_pre_hooks and not module._forward_hooks
    assert torch.equal(tiny_models.output(model, input_ids=ids), before)


def test_hidden_is_refused_where_a_module_gets_no_row_a_query():
    model = tiny_models.build("llama")
    hf_sigmoid.configure(model, "sigmoid", hidden=True)
    holder = model.model.layers[0].self_attn.log_length
    for inputs in (None, torch.zeros(1, 3, 8), torch.zeros(3, 32)):
        with pytest.raises(ValueError, match=r"layers\.0\.self_attn: .* is \[1, 3, 32\]"):
            holder(torch.zeros(1, 1, 3), torch.zeros(1, 4, 3, 8), inputs)
