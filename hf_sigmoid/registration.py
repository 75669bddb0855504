"""Where the two functions plug into transformers: the attention wrapper, and a few wraps of its
classes.

Importing this module registers, once transformers' model classes are loaded (`after_import.py`): it
adds the names "sigmoid" and "ssmax" to transformers' tables of attention and mask functions and
wraps six methods of PreTrainedModel and one of continuous batching; every wrap returns
transformers' own result for a model that does not use us. Reasons, one by one, at each wrap.
"""

import functools
import inspect
import re
import warnings

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, PreTrainedModel
from transformers.utils.output_capturing import _active_collector

from hf_sigmoid import functional, masks, parameters, reference
from hf_sigmoid.parameters import FUNCTIONS, HOLDER, LogLength

# The releases on which the whole test suite passes (`make test-versions`): lowest and newest.
TESTED = {"transformers": ("5.24", "5.24"), "torch": ("2.13", "2.14")}

# Arguments that change what a row sees in a way no mask says. They reach us because our names are
# not "eager" or "sdpa"; ignoring them would turn sparse attention into dense.
REFUSED = {"indices": "index-sparse attention", "block_indices": "block-sparse attention"}


def attention(
    function: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool | None = False,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls: query `[B, H, M, D]`, key `[B, G, N, D]`, value `[B, G, N, V]`.

    Returns:
        Output `[B, M, H, V]`, contiguous, and the weights `[B, H, M, N]` if `output_attentions`,
        else None.

    Raises:
        ValueError: the model passes an argument that this function cannot honour.
    """
    for name, what in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{function}: {type(module).__name__} passes `{name}` ({what}), "
                "which is not supported"
            )
    holder = getattr(module, HOLDER, None)
    if holder is not None and holder.function == "softmax":
        function = "softmax"  # a layer that the section leaves as it was
    sinks = s_aux if sinks is None else sinks
    if sinks is not None and function == "sigmoid":
        raise ValueError(
            f"sigmoid: {type(module).__name__} has attention sinks, "
            "a term of a softmax's denominator; "
            "sigmoid attention has none. Use attn_implementation='ssmax'"
        )

    # Under autocast q and k may arrive as float32 (RoPE) and v in the autocast dtype; norms kept in
    # float32 do the same.
    device = query.device
    dtype = (
        torch.get_autocast_dtype(device.type)
        if torch.is_autocast_enabled(device.type)
        else value.dtype
    )
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    M, N = query.shape[2], key.shape[2]
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and cu_seq_lens_q is not None:
        attention_mask = masks.packed_intervals(
            cu_seq_lens_q, cu_seq_lens_k, M, N, is_causal, sliding_window
        )
        attention_mask = attention_mask.expand(query.shape[0], 1, M, 2)
    visible, is_causal, logit_bias, count = masks.visible_keys(
        attention_mask, M, N, is_causal, device
    )
    if position_bias is not None:
        logit_bias = position_bias if logit_bias is None else logit_bias + position_bias

    options = {
        "scaling": scaling, "visible": visible, "is_causal": is_causal, "softcap": softcap,
        "logit_bias": logit_bias, "dropout": dropout,
    }  # fmt: skip
    log_n = torch.log(count.clamp(min=1))
    # A holder of the other function (the model runs under another name) says nothing about this
    # one.
    owned = holder is not None and holder.function == function != "softmax"
    if function == "sigmoid":
        options["bias"] = holder(log_n, query) if owned else -log_n
    else:
        options["multiplier"] = holder(log_n, query) if owned else 1.0
        options["sinks"] = sinks
    name = "sigmoid" if function == "sigmoid" else "ssmax"
    if output_attentions or _records_attentions():
        output, weights = getattr(reference, f"{name}_attention")(query, key, value, **options)
        weights = weights.to(dtype)
    else:
        output, weights = (
            getattr(functional, f"{name}_attention")(query, key, value, **options),
            None,
        )
    return output.transpose(1, 2).contiguous(), weights


def _records_attentions() -> bool:
    """Is the model collecting weights? Some (gpt2) do not pass `output_attentions` on."""
    collected = _active_collector.get()
    return collected is not None and any(key.endswith("attentions") for key in collected)


def register() -> None:
    """Add both names to transformers and install the wraps. Idempotent."""
    if "sigmoid" in AttentionInterface._global_mapping:
        return
    _check_versions()
    for target, name, _, arguments in WRAPS:
        original = inspect.getattr_static(target, name, None)
        plain = original.__func__ if isinstance(original, staticmethod) else original
        given = list(inspect.signature(plain).parameters) if plain is not None else []
        if given[: len(arguments)] != arguments:
            raise ImportError(
                f"hf_sigmoid wraps transformers' {target.__name__}.{name}{tuple(arguments)}, "
                f"but transformers {transformers.__version__} has {given}: "
                "install a tested release "
                f"({' to '.join(TESTED['transformers'])})"
            )
    for target, name, wrap, _ in WRAPS:
        original = inspect.getattr_static(target, name)
        if isinstance(original, staticmethod):
            setattr(
                target,
                name,
                staticmethod(functools.wraps(original.__func__)(wrap(original.__func__))),
            )
        else:
            setattr(target, name, functools.wraps(original)(wrap(original)))
    for function in FUNCTIONS:
        AttentionInterface.register(function, functools.partial(attention, function))
        AttentionMaskInterface.register(function, masks.interval_mask)


def _check_versions() -> None:
    for package, (lowest, newest) in TESTED.items():
        given = Version({"transformers": transformers, "torch": torch}[package].__version__)
        low, new = Version(lowest), Version(newest)
        if not low.release[:2] <= given.release[:2] <= new.release[:2]:
            warnings.warn(
                f"hf_sigmoid is tested with {package} {lowest} to {newest}, this is {given}: "
                "run its tests first",
                stacklevel=4,
            )


def _wrap_check(original):
    """The config's function if none is asked for; a warning if another one is."""

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        section = getattr(self.config, "hf_sigmoid", None)
        if section:
            parameters.check_section(self.config)
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


def _wrap_get_correct(original):
    """Refuse a model that would accept the name and run softmax; give the others their section."""

    def get_correct_attn_implementation(self, requested_attention, is_init_check=False):
        if requested_attention in FUNCTIONS:
            parameters.check_model(type(self), requested_attention)
            parameters.refuse_scaled_twice(self.config, requested_attention)
            if not getattr(self.config, "hf_sigmoid", None):
                parameters.make_default_section(self.config, requested_attention)
                if not is_init_check:  # set_attn_implementation on a finished model
                    _finish(self)
        return original(self, requested_attention, is_init_check)

    return get_correct_attn_implementation


def _wrap_post_init(original):
    """Holders must exist before weights load."""

    def post_init(self):
        parameters.attach(self)
        original(self)
        _finish(self)

    return post_init


def _finish(model: PreTrainedModel) -> None:
    """What a model must know about its holders: they stay float32 and are split with the heads."""
    parameters.attach(model)
    names = [f"{name}.{HOLDER}" for name, _ in parameters.holders(model)]
    if not names:
        return
    model._keep_in_fp32_modules_strict = set(model._keep_in_fp32_modules_strict or []) | {HOLDER}
    plan = getattr(model, "_tp_plan", None) or {}
    for name in names:
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        # Heads are split where q_proj is: each rank holds the numbers of its own heads.
        if plan.get(f"{pattern.removesuffix(HOLDER)}q_proj") == "colwise":
            for parameter in ("offset", "slope", "query"):
                plan[f"{pattern}.{parameter}"] = "colwise"


def _wrap_save(original):
    """config.json must name the function.

    transformers reads a plain attribute `attn_implementation` back as the keyword: a converted
    checkpoint runs its own function untold, and without this plugin transformers refuses the
    unknown name instead of dropping the parameters.
    """

    def save_pretrained(self, *args, **kwargs):
        if _has_section(self.config):
            self.config.attn_implementation = _implementations(self.config)
        elif getattr(self.config, "attn_implementation", None) is not None:
            del self.config.attn_implementation  # taken back out since it was last saved
        return original(self, *args, **kwargs)

    return save_pretrained


def _has_section(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "hf_sigmoid", None)) or any(
        map(_has_section, _sub_configs(config).values())
    )


def _implementations(config: PreTrainedConfig) -> str | dict | None:
    """A name, or for a composite model a dict whose "" is the model itself."""
    section = getattr(config, "hf_sigmoid", None)
    own = section["function"] if section else config._attn_implementation
    children = {name: _implementations(child) for name, child in _sub_configs(config).items()}
    return {"": own, **children} if children else own


def _sub_configs(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    pairs = ((name, getattr(config, name, None)) for name in config.sub_configs or {})
    return {name: child for name, child in pairs if isinstance(child, PreTrainedConfig)}


def _wrap_initialize(original):
    """A holder that the checkpoint lacks gets what the config says."""

    def _initialize_weights(self, module, is_custom_code=False):
        if not isinstance(module, LogLength):
            return original(self, module, is_custom_code)
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
        for keys, problem in (
            (extra, "has parameters that its"),
            (lacking, "lacks parameters of its"),
        ):
            if keys:
                shown = ", ".join(keys[:3]) + (
                    f" and {len(keys) - 3} more" if len(keys) > 3 else ""
                )
                section = getattr(model.config, "hf_sigmoid", None)
                raise ValueError(
                    f"{load_config.pretrained_model_name_or_path}: the checkpoint {problem} "
                    f"config.json's section hf_sigmoid ({dict(section) if section else 'absent'}) "
                    f"does not agree with: {shown}"
                )
        for _, module in parameters.holders(model):
            section = module.config.hf_sigmoid
            for parameter in module._modules[HOLDER].parameters():
                parameter.requires_grad_(section["learn"])
        return info

    return _finalize_model_loading


def _is_new(model: PreTrainedModel, key: str) -> bool:
    """Was the section of this parameter's module made by this process, so that nobody saved it?"""
    module = model.get_submodule(key.rpartition(f".{HOLDER}.")[0])
    return isinstance(module.config.hf_sigmoid, parameters.Section)


def _wrap_continuous_batching(original):
    """Its check knows no custom name: it refuses ours, or switches to a softmax kernel silently."""

    def switch_to_cb_friendly_attn(self, model, auto_switch_to_flash=True):
        if model.config._attn_implementation not in FUNCTIONS:
            return original(self, model, auto_switch_to_flash)

    return switch_to_cb_friendly_attn


# Class, method, wrap, and the first arguments that the wrap relies on.
WRAPS = [
    (PreTrainedModel, "post_init", _wrap_post_init, ["self"]),
    (
        PreTrainedModel,
        "_check_and_adjust_attn_implementation",
        _wrap_check,
        ["self", "attn_implementation", "is_init_check", "allow_all_kernels"],
    ),
    (
        PreTrainedModel,
        "get_correct_attn_implementation",
        _wrap_get_correct,
        ["self", "requested_attention", "is_init_check"],
    ),
    (
        PreTrainedModel,
        "_initialize_weights",
        _wrap_initialize,
        ["self", "module", "is_custom_code"],
    ),
    (
        PreTrainedModel,
        "_finalize_model_loading",
        _wrap_finalize,
        ["model", "load_config", "loading_info"],
    ),
    (PreTrainedModel, "save_pretrained", _wrap_save, ["self", "save_directory"]),
    (
        ContinuousBatchingManager,
        "switch_to_cb_friendly_attn",
        _wrap_continuous_batching,
        ["self", "model", "auto_switch_to_flash"],
    ),
]

register()
