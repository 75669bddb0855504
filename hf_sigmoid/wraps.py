"""Replacing a method of transformers by one that calls it, if it still is what we know."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple


class Wrap(NamedTuple):
    """A class, its method, what makes the new one of the old one, the first arguments relied on."""

    target: type
    method: str
    make: Callable[[Callable], Callable]
    arguments: list[str]


def install(wraps: list[Wrap]) -> None:
    """Put every wrap in place, or none.

    Raises:
        ImportError: a method that is not there, or whose first arguments are others.
    """
    plain = [_plain(inspect.getattr_static(each.target, each.method, None)) for each in wraps]
    for each, (function, _) in zip(wraps, plain, strict=True):
        given = list(inspect.signature(function).parameters) if function is not None else []
        if given[: len(each.arguments)] != each.arguments:
            import transformers

            raise ImportError(
                f"hf_sigmoid wraps transformers' {each.target.__name__}.{each.method}"
                f"{tuple(each.arguments)}, but transformers {transformers.__version__} has "
                f"{given}: install a release that hf_sigmoid's README names"
            )
    for each, (function, kind) in zip(wraps, plain, strict=True):
        wrapped = functools.wraps(function)(each.make(function))
        setattr(each.target, each.method, kind(wrapped) if kind else wrapped)


def _plain(method: Any) -> tuple[Callable | None, type | None]:
    """The function of a method, and what it was decorated by."""
    kind = type(method) if isinstance(method, staticmethod | classmethod) else None
    return (method.__func__ if kind else method), kind
