"""The source of a model's weights, and whether its config and function go with them."""

import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from hf_sigmoid.layer_types import unmarked
from hf_sigmoid.support import configs, models_of

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel

SOURCE = "_hf_sigmoid_source"  # an attribute of a model: where its weights were loaded from
_LIBRARIES = ("transformers", "hf_sigmoid")


def remember_source(model: "PreTrainedModel", source: str | None) -> None:
    """Where the weights of a model, and of its parts, were loaded from; None: they have changed."""
    for part in models_of(model):
        part.__dict__[SOURCE] = source


def saved_functions(load_config) -> dict[str, set[str | None]] | None:
    """The functions that each type of model was saved with; None if config.json cannot be read.

    Of the file, since a config may be handed in that is not the checkpoint's.
    """
    from transformers.utils import CONFIG_NAME
    from transformers.utils.hub import cached_file

    source = load_config.pretrained_model_name_or_path
    options = dict(load_config.download_kwargs or {})
    known = ("cache_dir", "revision", "subfolder", "token")
    options = {name: options[name] for name in known if options.get(name) is not None}
    file = source and cached_file(
        str(source), CONFIG_NAME, local_files_only=True, **options,
        _raise_exceptions_for_gated_repo=False, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    if not file:
        return None
    found: dict[str, set[str | None]] = {}
    pending = [unmarked(json.loads(Path(file).read_text(encoding="utf-8")))]
    while pending:
        each = pending.pop()
        section = each.get("hf_sigmoid")
        function = section.get("function") if isinstance(section, dict) else None
        found.setdefault(str(each.get("model_type")), set()).add(function)
        pending += [value for value in each.values() if isinstance(value, dict)]
    return found


def check_config_is_the_checkpoints(
    model: "PreTrainedModel", source: str, written: dict[str, set[str | None]] | None
) -> None:
    """Raise ValueError if a converted checkpoint was loaded with a config that says softmax."""
    for config in configs(model):
        functions = (written or {}).get(config.model_type, {None})
        if None not in functions and not getattr(config, "hf_sigmoid", None):
            raise ValueError(
                f"{source} was converted to {' and '.join(sorted(functions))}, and the config that "
                "was given for it says nothing of that: leave `config` out, or take the "
                "checkpoint's own"
            )


def runs_unconverted_sigmoid(
    model: "PreTrainedModel", written: dict[str, set[str | None]] | None = None
) -> bool:
    """Does a part run sigmoid, on weights that were loaded and not saved with it?

    Args:
        written: `saved_functions` of where they were loaded from; None: asked of the sections.
    """
    from hf_sigmoid.configuration import Section

    if model.__dict__.get(SOURCE) is None:
        return False
    for config in configs(model):
        section = getattr(config, "hf_sigmoid", None)
        runs = config._attn_implementation == "sigmoid" and section
        if runs and section["function"] == "sigmoid":
            if written is None and isinstance(section, Section):
                return True  # this process made it
            if written is not None and "sigmoid" not in written.get(config.model_type, ()):
                return True
    return False


def warn_of_softmax_weights(model: "PreTrainedModel") -> None:
    """Once: what weights that were trained with softmax give under sigmoid."""
    warnings.warn(
        f"{model.__dict__[SOURCE]} was not saved as a sigmoid model and runs sigmoid attention "
        "now: weights trained with softmax give noise under it. Convert it first (hf-sigmoid "
        "convert MODEL OUT --to sigmoid), then heal it by training",
        stacklevel=_outside_transformers(),
    )


def _outside_transformers() -> int:
    """The `stacklevel`, for the caller, of the code that called transformers or this package."""
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    return level
