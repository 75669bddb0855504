"""Guards against what PEFT, accelerate and continuous batching would do wrong in silence.

They are installed when these packages load. transformers may be half loaded at that moment, so
what needs it is imported at the call.
"""

import functools
import json
from pathlib import Path

from torch import nn

from hf_sigmoid.files import write_text

RECORD = "hf_sigmoid.json"  # beside an adapter: what its base was converted to
KEPT = ("function", "parameters", "layers", "anchor")  # of the section; the rest are start values


def guard_peft() -> None:
    """An adapter with per-query terms needs a model that has them; PEFT drops them silently."""
    from peft.tuners.tuners_utils import BaseTuner

    original = BaseTuner.inject_adapter

    @functools.wraps(original)
    def inject_adapter(self, model, adapter_name, *args, **kwargs):
        from hf_sigmoid.parameters import HOLDER, holder_of, holders
        from hf_sigmoid.support import Unsupported

        names = getattr(self.peft_config[adapter_name], "modules_to_save", None) or []
        keeps = any(name.rpartition(".")[-1] == HOLDER for name in names)
        if keeps and not any(list(holder_of(each).parameters()) for _, each in holders(model)):
            raise Unsupported(
                f"adapter {adapter_name!r} keeps {HOLDER!r} (modules_to_save), per-query terms of "
                f"sigmoid or ssmax attention, but {type(model).__name__} has none: load the "
                "converted checkpoint that the adapter was trained on, or convert this model the "
                "same way first"
            )
        return original(self, model, adapter_name, *args, **kwargs)

    BaseTuner.inject_adapter = inject_adapter


def guard_peft_model() -> None:
    """An adapter says what its base was converted to, and is loaded onto such a base only."""
    from peft.peft_model import PeftModel

    save, load = PeftModel.save_pretrained, PeftModel.load_adapter
    from_pretrained = PeftModel.from_pretrained.__func__

    @functools.wraps(save)
    def save_pretrained(self, save_directory, *args, **kwargs):
        result = save(self, save_directory, *args, **kwargs)
        if record := _record(self):
            for config in Path(save_directory).rglob("adapter_config.json"):
                write_text(config.with_name(RECORD), json.dumps(record, indent=2) + "\n")
        return result

    @functools.wraps(load)
    def load_adapter(self, model_id, *args, **kwargs):
        _check_base(self, model_id, kwargs)
        return load(self, model_id, *args, **kwargs)

    @functools.wraps(from_pretrained)
    def checked(cls, model, model_id, *args, **kwargs):
        _check_base(model, model_id, kwargs)
        return from_pretrained(cls, model, model_id, *args, **kwargs)

    PeftModel.save_pretrained, PeftModel.load_adapter = save_pretrained, load_adapter
    PeftModel.from_pretrained = classmethod(checked)


def guard_accelerate() -> None:
    """Parallelism along the sequence gives each rank part of the keys, and a wrong n."""
    from accelerate.accelerator import Accelerator

    original = Accelerator.prepare

    @functools.wraps(original)
    def prepare(self, *args, **kwargs):
        sizes = {
            name: getattr(self.parallelism_config, name, 1) or 1 for name in ("cp_size", "sp_size")
        }
        given = [f"{name}={size}" for name, size in sizes.items() if size > 1]
        functions = {_function(arg) for arg in args if isinstance(arg, nn.Module)} - {None}
        if given and functions:
            from hf_sigmoid.support import Unsupported

            raise Unsupported(
                f"{' and '.join(sorted(functions))} attention does not run with accelerate's "
                f"parallelism along the sequence ({', '.join(given)}): each rank would see only "
                "its own keys, with a wrong number n of them. Use tp_size, dp_shard_size or "
                "dp_replicate_size"
            )
        return original(self, *args, **kwargs)

    Accelerator.prepare = prepare


def guard_continuous_batching() -> None:
    """Its check knows no custom name: it refuses ours, or switches to a softmax kernel silently."""
    from transformers.generation.continuous_batching.continuous_api import (
        ContinuousBatchingManager,
    )

    from hf_sigmoid.compat import BATCHES_ANY_FUNCTION
    from hf_sigmoid.layer_types import FUNCTIONS
    from hf_sigmoid.wraps import Wrap, install

    def keep(original):
        def switch_to_cb_friendly_attn(self, model, *args, **kwargs):
            if model.config._attn_implementation not in FUNCTIONS:
                return original(self, model, *args, **kwargs)

        return switch_to_cb_friendly_attn

    def refuse(original):
        def __init__(self, model, *args, **kwargs):
            function = model.config._attn_implementation
            if function in FUNCTIONS:
                from hf_sigmoid.support import Unsupported

                raise Unsupported(
                    f"continuous batching needs kernels of its own before transformers 5.24, not "
                    f"{function} attention: upgrade transformers, or use generate()"
                )
            original(self, model, *args, **kwargs)

        return __init__

    method, wrap = ("__init__", refuse)
    if BATCHES_ANY_FUNCTION:
        method, wrap = ("switch_to_cb_friendly_attn", keep)
    install([Wrap(ContinuousBatchingManager, method, wrap, ["self", "model"])])


def _record(model: nn.Module) -> dict | None:
    """The record of a model's conversion, None if it has none."""
    for module in model.modules():
        section = getattr(getattr(module, "config", None), "hf_sigmoid", None)
        if section:
            return {key: section.get(key) for key in KEPT}
    return None


def _check_base(model: nn.Module, model_id: str, options: dict) -> None:
    """Raise `Unsupported` if the adapter was trained on another attention than the model has."""
    from transformers.utils.hub import cached_file

    from hf_sigmoid.support import Unsupported

    path = cached_file(
        str(model_id), RECORD, subfolder=options.get("subfolder") or "",
        revision=options.get("revision"), _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    if path is None:
        return
    trained, has = json.loads(Path(path).read_text(encoding="utf-8")), _record(model)
    if trained != has:
        raise Unsupported(
            f"{model_id} was trained on a model converted to {trained}, and this one "
            f"{f'is converted to {has}' if has else 'runs softmax'}: load the converted checkpoint "
            "that the adapter was trained on"
        )


def _function(model: nn.Module) -> str | None:
    """The one of our functions that some part of the model runs."""
    from hf_sigmoid.parameters import FUNCTIONS

    configs = (getattr(module, "config", None) for module in model.modules())
    names = (getattr(config, "_attn_implementation", None) for config in configs)
    return next((name for name in names if isinstance(name, str) and name in FUNCTIONS), None)
