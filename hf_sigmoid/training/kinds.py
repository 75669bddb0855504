"""The types of a run's keys: what YAML and a command line may write for each."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-4, without a point, as text."""
    if isinstance(value, bool):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return value
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {number}")
    return number


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text(value: Any) -> Any:
    """A folder may be called 7."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


def _integers(value: Any) -> Any:
    """One number, or several as 512,1024."""
    if isinstance(value, str) and all(part.strip().isdigit() for part in value.split(",")):
        return [int(part) for part in value.split(",")]
    return [value] if type(value) is int else value


def _words(value: Any) -> Any:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


Float = Annotated[float, BeforeValidator(_number), Field(strict=True)]
Int = Annotated[int, BeforeValidator(_whole), Field(strict=True)]
Bool = Annotated[bool, Field(strict=True)]
Text = Annotated[str, BeforeValidator(_text)]
Paths = Annotated[str | list[Annotated[str, Field(strict=True)]], BeforeValidator(_text)]
Lengths = Annotated[list[Annotated[int, Field(strict=True, ge=1)]], BeforeValidator(_integers)]
Trackers = Annotated[list[Literal["tensorboard", "wandb", "trackio"]], BeforeValidator(_words)]


def key(default: Any, about: str = "", **bounds: Any) -> Any:
    """A key with its default, the comment of `--keys`, and its bounds."""
    return Field(default, description=about, **bounds)


class Keys(BaseModel):
    """Keys that are checked when they are given, and do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
