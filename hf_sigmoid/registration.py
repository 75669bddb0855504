"""Registration in transformers: the two names, and a few wraps of its classes.

Importing this module registers, once transformers' model classes are loaded (`after_import.py`): it
adds the names "sigmoid" and "ssmax" to transformers' tables of attention and mask functions and
wraps seven methods of PreTrainedModel; every wrap returns
transformers' own result for a model that does not use us. Reasons, one by one, at each wrap.
"""

import functools
import re
import warnings

from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from hf_sigmoid import (
    compat,
    configuration,
    layer_types,
    masks,
    parameters,
    support,
    weights_source,
    wraps,
)
from hf_sigmoid.attention import attention
from hf_sigmoid.configuration import sub_configs
from hf_sigmoid.parameters import FUNCTIONS, HOLDER, LogLength

# An attribute of a model: the functions that its sub-configs named when it was begun.
REQUESTED = "_hf_sigmoid_requested"


def register() -> None:
    """Add both names to transformers and install the wraps. Idempotent."""
    if "sigmoid" in AttentionInterface._global_mapping:
        return
    compat.warn_of_untested()
    layer_types.register()
    wraps.install(WRAPS)
    names = PreTrainedConfig._attn_implementation
    PreTrainedConfig._attn_implementation = property(names.fget, _wrap_name(names.fset))
    for function in FUNCTIONS:
        AttentionInterface.register(function, functools.partial(attention, function))
        AttentionMaskInterface.register(function, masks.interval_mask)


def _wrap_name(original):
    """A dict that gives one of our names to a part that is none would be ignored."""

    def _attn_implementation(self, value):
        support.check_parts(self, value)
        original(self, value)

    return _attn_implementation


def _wrap_check(original):
    """The config's function if none is asked for; a warning if another one is."""

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        # While it is built a part may give its sub-configs other names (a backbone its own).
        if kwargs.get("is_init_check"):
            self.__dict__[REQUESTED] = support.wishes(self.config)
        configuration.forget_default(self, attn_implementation)
        section = getattr(self.config, "hf_sigmoid", None)
        if section:
            configuration.check_section(self.config)
            function = section["function"]
            attn_implementation = function if attn_implementation is None else attn_implementation
            if attn_implementation != function:
                warnings.warn(
                    f"{type(self).__name__} was converted to {function!r} attention "
                    "and is about to run "
                    f"{attn_implementation!r}: its results are not those of the checkpoint",
                    stacklevel=3,
                )
        return original(self, attn_implementation, *args, **kwargs)

    return _check_and_adjust_attn_implementation


def _wrap_set(original):
    """All parts are checked, also those that transformers skips; a refusal changes nothing."""

    def set_attn_implementation(self, attn_implementation, *args, **kwargs):
        ours = support.uses_ours(self)
        if not support.names_ours(attn_implementation):
            original(self, attn_implementation, *args, **kwargs)
            if ours and isinstance(attn_implementation, str):
                compat.set_copies(self, attn_implementation)
            return
        support.check_parts(self.config, attn_implementation)
        own = attn_implementation
        if isinstance(own, dict):
            own = own.get("", self.config._attn_implementation)
        if own in FUNCTIONS:
            support.check_class(type(self), self.config, own)
        was_sigmoid = weights_source.runs_unconverted_sigmoid(self)
        with support.unchanged_on_error(self):
            original(self, attn_implementation, *args, **kwargs)
            if own in FUNCTIONS:
                compat.set_copies(self, own)
            requested = (
                None if isinstance(attn_implementation, str) else support.wishes(self.config)
            )
            support.check_model(self, requested)
        if weights_source.runs_unconverted_sigmoid(self) and not was_sigmoid:
            weights_source.warn_of_softmax_weights(self)

    return set_attn_implementation


def _wrap_get_correct(original):
    """Refuse a model that would accept the name and run softmax; give the others their section."""

    def get_correct_attn_implementation(self, requested_attention, is_init_check=False):
        configuration.forget_default(self, requested_attention)
        support.check_name(type(self), requested_attention)
        if requested_attention in FUNCTIONS:
            support.check_class(type(self), self.config, requested_attention)
            if not getattr(self.config, "hf_sigmoid", None):
                configuration.make_default_section(self.config, requested_attention)
            if not is_init_check:  # set_attn_implementation on a finished model
                parameters.attach(self)
                _finish(self)
        return original(self, requested_attention, is_init_check)

    return get_correct_attn_implementation


def _wrap_post_init(original):
    """Holders must exist before weights load, and a refusal should come before them."""

    def post_init(self):
        parameters.attach(self)
        requested = self.__dict__.pop(REQUESTED, {})
        # The whole model is looked at once, when its outermost part is complete.
        if not support.is_part(self) and support.uses_ours(self):
            try:
                support.check_model(self, requested)
            except support.Unsupported:
                configuration.forget_default(self, "softmax")
                raise
        original(self)
        _finish(self)

    return post_init


def _finish(model: PreTrainedModel) -> None:
    """Tell a model about its holders: they stay float32 and are split with the heads."""
    names = [f"{name}.{HOLDER}" for name, _ in parameters.holders(model)]
    if not names:
        return
    model._keep_in_fp32_modules_strict = set(model._keep_in_fp32_modules_strict or []) | {HOLDER}
    plan = getattr(model, "_tp_plan", None) or {}
    for name in names:
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        # Heads are split where q_proj is: each rank holds the numbers of its own heads.
        if plan.get(f"{pattern.removesuffix(HOLDER)}q_proj") == "colwise":
            for parameter in parameters.NAMES:
                plan[f"{pattern}.{parameter}"] = "colwise"


def _wrap_save(original):
    """config.json must name the function.

    transformers reads a plain attribute `attn_implementation` back as the keyword: a converted
    checkpoint runs its own function untold, and without this plugin transformers refuses the
    unknown name instead of dropping the parameters.
    """

    def save_pretrained(self, *args, **kwargs):
        if configuration.find_section(self.config):
            self.config.attn_implementation = _implementations(self.config)
        elif getattr(self.config, "attn_implementation", None) is not None:
            del self.config.attn_implementation  # taken back out since it was last saved
        return original(self, *args, **kwargs)

    return save_pretrained


def _implementations(config: PreTrainedConfig) -> str | dict | None:
    """A name, or for a composite model a dict whose "" is the model itself.

    Of a converted model that was made to run, and perhaps to train, the other function: that one.
    """
    section, own = getattr(config, "hf_sigmoid", None), config._attn_implementation
    if section and own not in FUNCTIONS:
        own = section["function"]
    children = {name: _implementations(child) for name, child in sub_configs(config).items()}
    return {"": own, **children} if children else own


def _wrap_initialize(original):
    """A holder that the checkpoint lacks gets what the config says."""

    def _initialize_weights(self, module, *args, **kwargs):
        if not isinstance(module, LogLength):
            return original(self, module, *args, **kwargs)
        if not getattr(module, "_is_hf_initialized", False):
            module.reset_parameters()
            module._is_hf_initialized = True

    return _initialize_weights


def _wrap_finalize(original):
    """Parameters and section must agree; frozen numbers stay frozen (loading unfreezes)."""

    def _finalize_model_loading(model, load_config, loading_info):
        info = original(model, load_config, loading_info)
        part = f".{HOLDER}."
        extra = sorted(key for key in info.unexpected_keys if part in key)
        lacking = sorted(
            key for key in info.missing_keys if part in key and not _is_new(model, key)
        )
        source = load_config.pretrained_model_name_or_path
        for keys, problem in (
            (extra, "has parameters that its config.json does not name"),
            (lacking, "lacks parameters that its config.json names"),
        ):
            if keys:
                shown = ", ".join(keys[:3]) + (
                    f" and {len(keys) - 3} more" if len(keys) > 3 else ""
                )
                section = getattr(model.config, "hf_sigmoid", None)
                said = dict(section) if section else "absent"
                raise ValueError(
                    f"{source}: the checkpoint {problem}: {shown}. The section hf_sigmoid of "
                    f"config.json is {said}; expected the two as one command wrote them"
                )
        written = weights_source.saved_functions(load_config)
        weights_source.check_config_is_the_checkpoints(model, source, written)
        weights_source.remember_source(model, str(source))
        if weights_source.runs_unconverted_sigmoid(model, written):
            weights_source.warn_of_softmax_weights(model)
        if any(parameters.holders(model)):
            compat.check_sharded(model)
        for _, module in parameters.holders(model):
            section = module.config.hf_sigmoid
            for parameter in module._modules[HOLDER].parameters():
                parameter.requires_grad_(section["learn"])
        return info

    return _finalize_model_loading


def _is_new(model: PreTrainedModel, key: str) -> bool:
    """Was the section of this parameter's module made by this process, so that nobody saved it?"""
    module = model.get_submodule(key.rpartition(f".{HOLDER}.")[0])
    return isinstance(module.config.hf_sigmoid, configuration.Section)


WRAPS = [
    wraps.Wrap(PreTrainedModel, "post_init", _wrap_post_init, ["self"]),
    wraps.Wrap(
        PreTrainedModel,
        "_check_and_adjust_attn_implementation",
        _wrap_check,
        ["self", "attn_implementation", "is_init_check"],
    ),
    wraps.Wrap(
        PreTrainedModel,
        "get_correct_attn_implementation",
        _wrap_get_correct,
        ["self", "requested_attention", "is_init_check"],
    ),
    wraps.Wrap(PreTrainedModel, "_initialize_weights", _wrap_initialize, ["self", "module"]),
    wraps.Wrap(
        PreTrainedModel,
        "_finalize_model_loading",
        _wrap_finalize,
        ["model", "load_config", "loading_info"],
    ),
    wraps.Wrap(
        PreTrainedModel, "set_attn_implementation", _wrap_set, ["self", "attn_implementation"]
    ),
    wraps.Wrap(PreTrainedModel, "save_pretrained", _wrap_save, ["self", "save_directory"]),
]

register()
