"""What an older transformers lacks, so that a test of it says why it does not run there."""

import importlib.util
from collections.abc import Collection

import pytest
import torch
from _pytest.mark import ParameterSet
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_sigmoid.compat import RELEASE, TESTED

IS_NEWEST = Version(TESTED["transformers"][1]) <= RELEASE  # there nothing may lack


def has(release: str | None) -> bool:
    """Is this release at least that one? None: every release is."""
    return release is None or Version(release) <= RELEASE


# What transformers says without flash-attn. Until 5.10 it takes the folder kernels/ of a checkout
# that is on the path for Hugging Face's package.
NO_FLASH = "FlashAttention2"
if not has("5.10") and importlib.util.find_spec("kernels"):
    NO_FLASH = "Invalid version"


def needs(release: str, what: str) -> pytest.MarkDecorator:
    """A mark: transformers has this since a release."""
    return pytest.mark.skipif(
        Version(release) > RELEASE, reason=f"transformers {RELEASE}: {what} came with {release}"
    )


def marks(release: str | None, what: str) -> list[pytest.MarkDecorator]:
    """The marks of what came with a release; None: every release has it."""
    return [needs(release, what)] if release else []


def marked(cases: Collection[str], since: dict[str, str]) -> list[ParameterSet]:
    """Cases of a test, each with the mark of the release that it came with."""
    return [pytest.param(case, marks=marks(since.get(case), case)) for case in cases]


def skip_without(model_type: str, known: Collection[str] = CONFIG_MAPPING_NAMES) -> None:
    """Skip the test if this release is too old for a model type."""
    if model_type not in known and not IS_NEWEST:
        pytest.skip(f"transformers {RELEASE} has no model type {model_type}")


def refuses(cls: type) -> bool:
    """Is a class, on this release, not yet on the attention interface, and so refused?"""
    return not IS_NEWEST and not cls._can_set_attn_implementation()


def skip_if_refused(cls: type) -> None:
    """Skip the test if a class is not yet on the attention interface on this release."""
    if refuses(cls):
        pytest.skip(f"transformers {RELEASE}: {cls.__name__} is not on the attention interface")


def skip_unless_exported(function: str) -> None:
    """Skip the test where torch.export, not strict, bounds the length of grouped softmax.

    transformers' own sdpa attention is bounded there in the same way: torch 2.10 and 2.11 do it,
    2.13 does not.
    """
    if function == "ssmax" and Version(torch.__version__) < Version("2.13"):
        pytest.skip(f"torch {torch.__version__} exports no grouped softmax of any length")
