"""The configuration of a run: YAML of nested keys plus `key.sub=value` overrides.

Whatever is not declared in `run_keys.py` is an error, so a misspelt key cannot be ignored.
"""

import difflib
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hf_sigmoid.errors import BadInput
from hf_sigmoid.training.run_keys import Run

Model = TypeVar("Model", bound=BaseModel)
_BOUNDS = {
    "ge": "at least {:.10g}",
    "gt": "a positive number",  # 0 is all that a key must be above
    "lt": "a number below {:.10g}",
    "le": "at most {:.10g}",
}


def load(file: str | os.PathLike | None, overrides: list[str], kind: type[Model] = Run) -> Model:
    """The `Run` (or `Distil`) that a YAML file and `key.sub=value` overrides describe.

    Overrides win.
    """
    values: dict[str, Any] = {} if file is None else _read(Path(file))
    for override in _whole(overrides):
        key, equals, value = override.partition("=")
        if not equals:
            raise BadInput(f"expected KEY=VALUE after the options, got {override!r}")
        values[key] = _parse(value, override)
    known = {name for name, _ in keys(kind)}
    groups = {name.rpartition(".")[0] for name in known}
    nested: dict[str, Any] = {}
    for key, value in values.items():
        if value is None and key in groups:
            continue  # a group without keys in the file
        if key not in known:
            raise BadInput(_unknown(key, known))
        group, _, name = key.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[name] = value
    return checked(kind, nested)


def checked(kind: type[Model], values: dict[str, Any], prefix: str = "") -> Model:
    """Values as the keys of `kind`; the first mistake is one line.

    Args:
        prefix: of the keys in that line.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise BadInput(_line(kind, error.errors()[0], prefix, values)) from None


def keys(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key by its dotted name, in the order of the file."""
    for name, field in kind.model_fields.items():
        if _is_group(field.annotation):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def describe(kind: type[BaseModel]) -> str:
    """Every key with its default, its type or choices, its bounds and its comment."""
    lines = []
    for name, field in keys(kind):
        default = "…" if field.is_required() else yaml.safe_dump(field.default).split("\n")[0]
        said = ", ".join([_expected(field.annotation), *_bounds(field)])
        lines.append(f"{name}={default}  # {'; '.join(filter(None, [said, field.description]))}")
    return "\n".join(lines)


def flat(run: BaseModel) -> dict[str, Any]:
    """Every key of a run with its value, by dotted name."""
    return _flatten(run.model_dump())


def defaults(kind: type[BaseModel]) -> dict[str, Any]:
    return {name: field.default for name, field in keys(kind)}


def dump(run: BaseModel) -> str:
    """A run as YAML that `load` reads back."""
    return yaml.safe_dump(run.model_dump(), sort_keys=False)


def _whole(overrides: list[str]) -> list[str]:
    """A shell cuts key=[a, b] at its blank: a list goes on until it is closed."""
    whole: list[str] = []
    for each in overrides:
        if whole and whole[-1].count("[") > whole[-1].count("]"):
            whole[-1] += f" {each}"
        else:
            whole.append(each)
    return whole


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise BadInput(f"no such configuration file: {path}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise BadInput(f"{path}: expected keys and values, got {type(content).__name__}")
    return _flatten(content)


def _flatten(nested: dict, prefix: str = "") -> dict[str, Any]:
    result = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        result |= _flatten(value, name + ".") if isinstance(value, dict) else {name: value}
    return result


def _parse(value: str, override: str) -> Any:
    try:
        return yaml.safe_load(value) if value.strip() else value
    except yaml.YAMLError:
        raise BadInput(f"the value of {override!r} is not YAML") from None


def _unknown(key: str, known: Any) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
    return f"unknown key {key!r}; the nearest known key is {near!r}"


def _line(kind: type[BaseModel], error: Any, prefix: str, value: Any) -> str:
    """The mistake that pydantic found, as `key: expected …, got …`."""
    # Down to the key, by the way that pydantic gives; it goes on into the branches of a union.
    annotation, field, key = kind, None, prefix
    for step in error["loc"]:
        inner = _parts(annotation)
        model = next((each for each in inner if _is_group(each)), None)
        if isinstance(step, int):
            annotation = next(get_args(each)[0] for each in inner if get_origin(each) is list)
            key += f"[{step}]"
        elif model and step in model.model_fields:
            field = model.model_fields[step]
            annotation, key = field.annotation, f"{key}.{step}".lstrip(".")
        elif model:
            return f"{key}: {_unknown(step, model.model_fields)}"
        else:
            break  # a branch
        if isinstance(value, dict):
            value = value.get(step)
        else:  # one number, or text, may be given for a list
            value = value[step] if isinstance(value, list) else error["input"]
    context, given = error.get("ctx", {}), error["input"]
    if error["type"] == "value_error":
        said = str(context["error"])
        return key + (": " if said.startswith("expected") else "." if key else "") + said
    if key in ("model", "output_dir") and error["type"] in ("missing", "string_too_short"):
        return f"{key} is missing: give {key}=… on the command line or in the YAML"
    if error["type"] == "too_short":
        return f"{key}: expected a list with something in it, got {value!r}"
    for bound, words in _BOUNDS.items():
        if bound in context:
            null = " or null" if bound == "gt" and field.default is None else ""
            return f"{key}: expected {words.format(context[bound])}{null}, got {given}"
    return f"{key}: expected {_expected(annotation)}, got {value!r}"


def _parts(annotation: Any) -> list[Any]:
    """The types that a value may have, without what checks them."""
    if get_origin(annotation) is Annotated:
        return _parts(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [part for each in get_args(annotation) for part in _parts(each)]
    return [annotation]


def _expected(annotation: Any) -> str:
    return " or ".join(map(_named, _parts(annotation)))


def _named(kind: Any) -> str:
    if kind is type(None):
        return "null"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is list:
        return f"a list of {_expected(get_args(kind)[0])}"
    return "keys and values" if _is_group(kind) else kind.__name__


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _bounds(field: FieldInfo) -> Iterator[str]:
    for each in field.metadata:
        for name, words in _BOUNDS.items():
            if hasattr(each, name):
                yield words.format(getattr(each, name))
