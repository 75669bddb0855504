"""Ids that a model has read once, and that many continuations go on from.

    prefix = Prefix.read(model, ids[:, :-1])
    logits = prefix.logits(ids[:, -1:])           # the prefix is afterwards as it was
    prefix.extend(more)                           # now it is longer

Keys and values are cropped after each continuation. Of caches that cannot be cropped exactly
(sliding windows, recurrent states) each continuation gets a copy: more memory, the same numbers.
"""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from hf_sigmoid.compat import CACHE, is_croppable

# Layers that never write into their tensors: a copy may share them.
SHARED = (DynamicLayer, DynamicSlidingWindowLayer)


class NoCache(ValueError):
    """The model gives no cache of what it has read."""


class Prefix:
    """The keys and values, or states, that a model keeps of `length` ids of each row.

    `tokens` counts every id of every row that was forwarded, which is what an evaluation costs.
    """

    def __init__(self, model: Any, cache: Cache, length: int, tokens: int = 0):
        self.model, self.cache, self.length, self.tokens = model, cache, length, tokens
        # Exactly this class: what derives from it keeps more than keys and values.
        plain = all(type(layer) is DynamicLayer for layer in cache.layers)
        self._can_crop = plain and not hasattr(cache, "linear_cache") and is_croppable(cache)

    @classmethod
    def read(cls, model: Any, ids: Tensor) -> "Prefix":
        """Read ids `[rows, length]` in one forward, which makes one position's logits.

        Raises:
            NoCache: the model returns none, or one that does not hold them all.
        """
        return cls.after(model, model(input_ids=ids, use_cache=True, **kept(model, 1)), ids)

    @classmethod
    def after(cls, model: Any, result: Any, ids: Tensor) -> "Prefix":
        """The prefix that the forward of ids `[rows, length]` leaves."""
        cache = getattr(result, CACHE, None)
        try:
            holds = isinstance(cache, Cache) and cache.get_seq_length() == ids.shape[1]
        except (ValueError, NotImplementedError):
            holds = False  # a model of recurrent states alone
        if not holds:
            raise NoCache(f"{type(model).__name__} keeps no cache that a continuation can use")
        return cls(model, cache, ids.shape[1], ids.numel())

    def extend(self, ids: Tensor, *, keep: int = 1) -> Tensor:
        """Read more ids `[rows, M]`; the logits of the last `keep` of them."""
        logits = self._forward(self.cache, ids, keep)
        self.length += ids.shape[1]
        return logits

    def logits(self, ids: Tensor) -> Tensor:
        """Logits `[rows, M, vocabulary]` in float32 of ids `[rows, M]` behind the prefix."""
        with self.borrowed() as cache:
            return self._forward(cache, ids, ids.shape[1]).float()

    @contextmanager
    def borrowed(self) -> Iterator[Cache]:
        """The cache, for whatever makes it longer; then it is cropped to what it was."""
        if not self._can_crop:
            yield _copied(self.cache)
            return
        try:
            yield self.cache
        finally:
            self.cache.crop(self.length - self.cache.get_seq_length())

    @contextmanager
    def longer(self, ids: Tensor) -> Iterator["Prefix"]:
        """The prefix with more ids behind it, for a while."""
        with self.borrowed() as cache:
            inner = Prefix(self.model, cache, self.length)
            if ids.shape[1]:
                inner.extend(ids)
            yield inner
            self.tokens += inner.tokens

    def _forward(self, cache: Cache, ids: Tensor, keep: int) -> Tensor:
        self.tokens += ids.numel()
        options = {CACHE: cache, **kept(self.model, keep)}
        return self.model(input_ids=ids, use_cache=True, **options).logits[:, -keep:]


def _copied(cache: Cache) -> Cache:
    """A cache that can be made longer without changing this one."""
    made = copy.copy(cache)
    for name, held in vars(cache).items():
        if isinstance(held, list | dict):
            setattr(made, name, copy.copy(held))  # of states beside the layers', replaced in it
    made.layers = [
        copy.copy(layer) if type(layer) in SHARED else copy.deepcopy(layer)
        for layer in cache.layers
    ]
    return made


def kept(model: Any, positions: int) -> dict[str, int]:
    """The option that keeps a model from making the logits of all positions."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return {"logits_to_keep": positions}
    return {}
