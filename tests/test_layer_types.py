"""A converted checkpoint never runs as softmax in a program that lacks the package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import releases
import tiny_models
import torch
from packaging.version import Version
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

import hf_sigmoid
from hf_sigmoid.compat import RELEASE
from hf_sigmoid.configuration import Section, find_section
from hf_sigmoid.layer_types import unmarked
from hf_sigmoid.parameters import sub_configs

SECTION = {
    "version": 1, "function": "ssmax", "offset": 1.0, "slope": 0.0,
    "parameters": ["offset", "slope"], "learn": True, "layers": None,
}  # fmt: skip
ASKED = ("", *(f"attn_implementation={each!r}" for each in (None, "sdpa", "eager")))


def without_the_package(code: str) -> subprocess.CompletedProcess:
    """Run in a process that never imports hf_sigmoid."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def loads(folder, asked: str, classes: tuple[str, ...]) -> str:
    """A program that prints what every class said, a line each."""
    return f"""
import transformers
transformers.logging.set_verbosity_error()
for name in {classes}:
    load = getattr(transformers, name).from_pretrained
    try:
        load({str(folder)!r}, {asked})
        print(name, "LOADED")
    except Exception as error:
        print(name, str(error).replace(chr(10), " "))
"""


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> dict[str, Path]:
    """Folders of converted models, by name."""
    folder = tmp_path_factory.mktemp("converted")
    families = ("llama", "gemma3", "gpt2")
    models = {name: tiny_models.build(name, attn_implementation="ssmax") for name in families}
    models["some layers"] = tiny_models.build("llama")
    hf_sigmoid.configure(models["some layers"], "sigmoid", learn=True, layers=[1])
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    text = tiny_models.config("llama").to_dict()
    models["llava"] = LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, image_token_index=3)
    )
    models["llava"].set_attn_implementation({"text_config": "ssmax"})
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return {name: folder / name for name in models}


@pytest.mark.parametrize("asked", ASKED)
def test_without_the_package_every_class_refuses(converted, asked):
    classes = {
        "llama": ("AutoModelForCausalLM", "LlamaForCausalLM", "LlamaModel", "AutoConfig"),
        "gemma3": ("AutoModelForCausalLM", "Gemma3ForCausalLM", "AutoConfig"),
        "gpt2": ("AutoModel", "GPT2LMHeadModel", "AutoConfig"),
        "some layers": ("AutoModelForCausalLM", "LlamaForCausalLM", "AutoConfig"),
        "llava": ("AutoModelForImageTextToText", "LlavaForConditionalGeneration", "AutoConfig"),
    }
    code = "".join(loads(converted[name], asked, each) for name, each in classes.items())
    ran = without_the_package(code)
    said = ran.stdout.splitlines()
    assert len(said) == sum(map(len, classes.values())), ran.stderr
    for line in said:
        assert "LOADED" not in line and "hf_sigmoid" in line, line


@pytest.mark.parametrize("asked", ["", "attn_implementation=None"])
def test_with_the_package_all_of_them_run_their_function(converted, asked):
    code = f"""
import hf_sigmoid
from transformers import AutoConfig
AutoConfig.from_pretrained({str(converted["gemma3"])!r})  # before any model class is loaded
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from hf_sigmoid.evals.models import attention_names
for kind, folder in (
    (AutoModelForCausalLM, {str(converted["llama"])!r}),
    (AutoModelForCausalLM, {str(converted["gemma3"])!r}),
    (AutoModelForCausalLM, {str(converted["some layers"])!r}),
    (AutoModelForImageTextToText, {str(converted["llava"])!r}),
):
    print(attention_names(kind.from_pretrained(folder, {asked})))
"""
    ran = without_the_package(code)
    assert ran.stdout.split() == ["ssmax", "ssmax", "sigmoid", "sdpa+ssmax"], ran.stderr


def test_a_config_in_memory_has_transformers_own_types(converted):
    gemma = AutoConfig.from_pretrained(converted["gemma3"])
    assert gemma.layer_types == ["sliding_attention", "full_attention"]
    written = json.loads((converted["gemma3"] / "config.json").read_text())["layer_types"]
    assert written == ["sliding_attention by hf_sigmoid", "full_attention by hf_sigmoid"]
    llama = AutoConfig.from_pretrained(converted["some layers"])
    assert not hasattr(llama, "layer_types")
    written = json.loads((converted["some layers"] / "config.json").read_text())["layer_types"]
    assert written == ["full_attention", "sigmoid by hf_sigmoid"]
    llava = AutoConfig.from_pretrained(converted["llava"])
    assert not hasattr(llava.text_config, "layer_types")
    assert not hasattr(llava.vision_config, "layer_types")


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        # The bare config that transformers falls back to refuses RoPE by kinds of layers in 5.4.
        pytest.param("gemma3", marks=releases.needs("5.5", "a fallback for such tokenizers")),
        "gpt2",
        "llava",
    ],
)
def test_its_tokenizer_loads_without_the_package(converted, name):
    tiny_models.byte_tokenizer().save_pretrained(converted[name])
    code = f"""
from transformers import AutoTokenizer
print(AutoTokenizer.from_pretrained({str(converted[name])!r})("words").input_ids)
"""
    ran = without_the_package(code)
    assert ran.stdout == f"{tiny_models.byte_tokenizer()('words').input_ids}\n", ran.stderr


def test_a_config_saved_alone_is_refused_too(tmp_path):
    config = tiny_models.config("llama")
    hf_sigmoid.configure(config, "ssmax")
    config.save_pretrained(tmp_path)
    ran = without_the_package(loads(tmp_path, "", ("AutoConfig", "LlamaConfig")))
    assert ran.stdout.count("hf_sigmoid") >= 2 and "LOADED" not in ran.stdout, ran.stderr
    again = AutoConfig.from_pretrained(tmp_path)
    assert {**again.to_dict(), "_name_or_path": ""} == config.to_dict()


def test_a_model_taken_back_to_softmax_loads_everywhere(converted, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(converted["gemma3"])
    hf_sigmoid.configure(model, "softmax")
    model.save_pretrained(tmp_path)
    ran = without_the_package(loads(tmp_path, "", ("AutoModelForCausalLM",)))
    assert ran.stdout == "AutoModelForCausalLM LOADED\n", ran.stderr


def test_a_folder_of_an_earlier_release_still_loads(converted, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(converted["gemma3"])
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = unmarked(json.loads(file.read_text()))
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    file.write_text(json.dumps(config))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "ssmax"
    ids = torch.arange(1, 9)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


class Unvalidated(LlamaConfig):
    """A config class of somebody's own, without transformers' decorator: it validates nothing."""

    model_type = "unvalidated_llama"


def test_a_config_class_that_validates_nothing_refuses_too():
    config = Unvalidated(num_hidden_layers=2)
    hf_sigmoid.configure(config, "ssmax")
    written = json.loads(config.to_json_string())
    assert Unvalidated.from_dict(written).to_dict() == config.to_dict()
    code = f"""
from transformers import LlamaConfig
class Unvalidated(LlamaConfig):
    model_type = "unvalidated_llama"
Unvalidated.from_dict({written!r})
"""
    ran = without_the_package(code)
    assert ran.returncode and "pip install hf-sigmoid, import hf_sigmoid" in ran.stderr


def test_every_config_class_of_transformers_refuses_and_reads_back(tmp_path):
    """Each class and each class of a part, with its default values."""
    classes, pending = {}, [CONFIG_MAPPING[name] for name in CONFIG_MAPPING_NAMES]
    while pending:
        cls = pending.pop()
        if isinstance(cls, type) and cls.__name__ not in classes:
            classes[cls.__name__] = cls
            pending += (getattr(cls, "sub_configs", None) or {}).values()
    written, unusable = [], []
    for name, cls in classes.items():
        file = tmp_path / f"{name}.json"
        try:
            config = cls()
            config.to_json_file(file)
            before = cls.from_json_file(file).to_dict()
        except Exception:  # some have no defaults, and one does not read what it writes
            unusable.append(name)
            continue
        if not hasattr(cls, "model_type") or sub_configs(config):
            continue  # of composite ones each part is converted by itself
        if name == "DbrxFFNConfig" and Version("5.20") > RELEASE:
            continue  # of no attention, and takes no key that it does not know
        config.hf_sigmoid = Section(SECTION)
        config.to_json_file(file)
        again = cls.from_json_file(file)
        assert find_section(again) == SECTION, name
        after = again.to_dict()
        del after["hf_sigmoid"]
        assert after == before, name
        written.append((cls.__module__, name, str(file)))
    assert len(written) > (400 if releases.IS_NEWEST else 350)
    assert len(unusable) < 5 or not releases.IS_NEWEST, unusable
    code = f"""
import importlib
for module, name, file in {written}:
    try:
        getattr(importlib.import_module(module), name).from_json_file(file)
        print("LOADED", name)
    except Exception as error:
        print("refused")
"""
    ran = without_the_package(code)
    assert ran.stdout.splitlines() == ["refused"] * len(written), ran.stderr[-2000:]


def test_processes_that_a_program_starts_have_the_names_too(converted, tmp_path):
    child = tmp_path / "child.py"
    child.write_text(
        "from transformers import AutoModelForCausalLM as A\n"
        f"print(A.from_pretrained({str(converted['llama'])!r}).config._attn_implementation)\n"
    )
    parent = tmp_path / "parent.py"
    parent.write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, {str(child)!r}], check=True)\n"
    )
    command = [sys.executable, "-m", "hf_sigmoid", str(parent)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.stdout == "ssmax\n", ran.stderr


def test_a_site_customisation_of_the_environment_still_runs_in_them(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.here_too = True\n")
    parent = tmp_path / "parent.py"
    code = "import sys; print(sys.here_too, 'hf_sigmoid' in sys.modules)"
    parent.write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}], check=True)\n"
    )
    command = [sys.executable, "-m", "hf_sigmoid", str(parent)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.stdout == "True True\n", ran.stderr
