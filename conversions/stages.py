"""Seconds and tokens of a conversion, stage by stage."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stages:
    """Seconds and tokens by stage; a stage that is entered again adds up."""

    def __init__(self):
        self._spent: dict[str, dict] = {}

    @contextmanager
    def __call__(self, name: str, tokens: int = 0) -> Iterator[None]:
        """Time what happens inside; `tokens` are those that run through the model there."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = self._spent.setdefault(name, {"stage": name, "seconds": 0.0, "tokens": 0})
            spent["seconds"] += time.perf_counter() - start
            spent["tokens"] += tokens

    def rows(self) -> list[dict]:
        return [{**row, "seconds": round(row["seconds"], 1)} for row in self._spent.values()]
