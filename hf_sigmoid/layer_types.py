"""Entries of `layer_types` that keep a program without this package from running softmax.

In a config.json that has our section every converted layer is of a type of its own, and so is the
model:

    "model_type": "gemma3_text by hf_sigmoid",
    "layer_types": ["sliding_attention by hf_sigmoid", "full_attention by hf_sigmoid", …],
    "num_hidden_layers by hf_sigmoid": 26,

the layers "ssmax by hf_sigmoid" where the config has no types. transformers refuses types that it
does not know, whatever attention function it is asked for: its Auto classes the model's, and each
class of a model the layers'; the messages print them. Tokenizers and processors still load: for
them it falls back to a bare config, which looks at layers only beside their number. Here the
entries are put into the JSON text that a config writes and taken out of what it is read from, so a
config in memory never has them.

`register` wraps three methods of PreTrainedConfig; nothing here loads torch or model classes.
"""

import functools
import json
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from hf_sigmoid.wraps import Wrap, install

BY = " by hf_sigmoid"
FUNCTIONS = ("sigmoid", "ssmax")
HOLDER = "log_length"  # the holder's name on an attention module, and so in a checkpoint
WITHOUT_ATTENTION = ("conv", "linear_attention", "moe")
# A property without a setter: every config class refuses the key, and logs its value.
REFUSED_KEY = "use_return_dict"


def mark(config: PreTrainedConfig, written: dict[str, Any]) -> None:
    """Put our entries into a config's JSON, in place."""
    if _mark_layers(config, written) and "model_type" in written:
        written["model_type"] += BY


def _mark_layers(config: PreTrainedConfig, written: dict[str, Any]) -> bool:
    """Mark a config and its parts that have a section. Is there one?"""
    found = False
    for name, value in written.items():
        part = vars(config).get(name)
        if isinstance(value, dict) and isinstance(part, PreTrainedConfig):
            found |= _mark_layers(part, value)
    section = vars(config).get("hf_sigmoid")
    if not isinstance(section, dict):
        return found
    function, chosen, count = section.get("function"), section.get("layers"), layer_count(config)
    # The JSON leaves out what is the class's default.
    own = written.get("layer_types") or vars(config).get("layer_types")
    types = own or ["full_attention"] * (count or 1)
    if chosen is None or len(types) != count:  # Dory writes two types a layer
        chosen = range(len(types))
    layers = [i for i in chosen if i < len(types) and types[i] not in WITHOUT_ATTENTION] or chosen
    written["layer_types"] = [
        f"{each if own else function}{BY}" if i in layers else each for i, each in enumerate(types)
    ]
    if "num_hidden_layers" in written:
        written[f"num_hidden_layers{BY}"] = written.pop("num_hidden_layers")
    elif not hasattr(config, "num_hidden_layers"):
        written["num_hidden_layers"] = None  # else the types would not be looked at
    if "__class_validators__" not in vars(type(config)):  # a class of somebody's own, not validated
        written[REFUSED_KEY] = f"{function}{BY}: pip install hf-sigmoid, import hf_sigmoid"
    return True


def unmarked(read: dict[str, Any]) -> dict[str, Any]:
    """A copy of a config's JSON without our entries, of its parts too."""
    plain = {
        name: unmarked(value) if isinstance(value, dict) else value for name, value in read.items()
    }
    if isinstance(plain.get("model_type"), str):
        plain["model_type"] = plain["model_type"].removesuffix(BY)
    if f"num_hidden_layers{BY}" in plain:
        plain["num_hidden_layers"] = plain.pop(f"num_hidden_layers{BY}")
    types = plain.get("layer_types")
    if isinstance(types, list) and any(isinstance(t, str) and t.endswith(BY) for t in types):
        types = [each.removesuffix(BY) for each in types]
        plain["layer_types"] = types
        if any(each in FUNCTIONS for each in types):
            del plain["layer_types"]
        if plain.get("num_hidden_layers", 0) is None:
            del plain["num_hidden_layers"]
        if isinstance(plain.get(REFUSED_KEY), str):
            del plain[REFUSED_KEY]
    return plain


def layer_count(config: PreTrainedConfig) -> int | None:
    """The layers of a model, of an encoder-decoder those of its deeper stack."""
    names = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
    counts = [getattr(config, name, None) for name in names]
    return max((count for count in counts if isinstance(count, int)), default=None)


def _wrap_write(original):
    def to_json_string(self, *args, **kwargs):
        text = original(self, *args, **kwargs)
        if '"hf_sigmoid"' not in text:
            return text
        written = json.loads(text)
        mark(self, written)
        return json.dumps(written, indent=2, sort_keys=True) + "\n"

    return to_json_string


def _wrap_read(original):
    def _dict_from_json_file(cls, json_file, *args, **kwargs):
        return unmarked(original(cls, json_file, *args, **kwargs))

    return _dict_from_json_file


def _wrap_build(original):
    def from_dict(cls, config_dict, *args, **kwargs):
        return original(cls, unmarked(config_dict), *args, **kwargs)

    return from_dict


@functools.cache
def register() -> None:
    """Install the wraps, once."""
    install(
        [
            Wrap(PreTrainedConfig, "to_json_string", _wrap_write, ["self"]),
            Wrap(PreTrainedConfig, "_dict_from_json_file", _wrap_read, ["cls", "json_file"]),
            Wrap(PreTrainedConfig, "from_dict", _wrap_build, ["cls", "config_dict"]),
        ]
    )
