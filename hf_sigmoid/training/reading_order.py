"""The order in which documents are read: endless, seeded, and a few integers to come back to it.

S streams read one corpus side by side and no document twice in an epoch. The order of an epoch is
a permutation of the documents (of the shards, when they are streamed); written one after the other
the epochs make one endless sequence, and stream s takes its places s, s + S, s + 2S, …, so there
may be fewer documents than streams.
"""

import hashlib
import random
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

SHUFFLED = 1_000_000  # up to so many places a permutation is a shuffled list
WINDOW = 1000  # rows of a shard that are permuted together: what a resume reads again


class Feistel(Sequence):
    """A seeded permutation of range(n) that holds no list.

    A Feistel network permutes the pairs of halves of a number; a result beyond n is put through it
    again until it falls below ("cycle walking": Black and Rogaway 2002, "Ciphers with arbitrary
    finite domains"). The network's domain is below 4n, so four times on average at most.
    """

    ROUNDS = 4

    def __init__(self, n: int, seed: str):
        self.n, self.seed = n, seed.encode()
        self.half = max(1, ((n - 1).bit_length() + 1) // 2)  # bits

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self.n:
            raise IndexError(place)
        while True:
            place = self._permuted(place)
            if place < self.n:
                return place

    def _permuted(self, value: int) -> int:
        mask = (1 << self.half) - 1
        left, right = value >> self.half, value & mask
        for number in range(self.ROUNDS):
            key = b"%d/%d/%b" % (number, right, self.seed)
            digest = hashlib.blake2b(key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        return left << self.half | right


def permutation(n: int, seed: str) -> Sequence[int]:
    """Every number below n once."""
    if n > SHUFFLED:
        return Feistel(n, seed)
    order = list(range(n))
    random.Random(seed).shuffle(order)
    return array("q", order)  # a quarter of the list's memory


class Epochs:
    """The permutation of every epoch, shared by the streams that read one source."""

    def __init__(self, n: int, seed: int | str):
        self.n, self.seed = n, seed
        # Streams are seldom more than an epoch apart.
        self.order = lru_cache(maxsize=4)(lambda epoch: permutation(n, f"{seed}/{epoch}"))


class DocumentReader:
    """One stream's place among documents that can be read in any order."""

    def __init__(self, source: Sequence[str], epochs: Epochs, stream: int, streams: int):
        self.source, self.epochs, self.streams = source, epochs, streams
        self.epoch, self.document = divmod(stream, epochs.n)

    def state(self) -> dict[str, int]:
        """The epoch and the place in its order."""
        return {"epoch": self.epoch, "document": self.document}

    def load_state(self, state: dict[str, int]) -> None:
        self.epoch, self.document = state["epoch"], state["document"]

    def read(self) -> str:
        """The document at this place."""
        return self.source[self.epochs.order(self.epoch)[self.document]]

    def advance(self) -> None:
        place = self.epoch * self.epochs.n + self.document + self.streams
        self.epoch, self.document = divmod(place, self.epochs.n)


class ShardReader:
    """One stream's place among shards that are read from their first row to their last.

    Shards are taken in the order of the epoch's permutation. Rows are read a window at a time, and
    the documents of a window are permuted. With more streams than shards every shard is divided
    into `parts`: part k has the rows k, k + parts, …, and a window is as many times longer.

    Args:
        source: has `shards` and `windows(shard, first, rows)`.
        epochs: of the parts of all shards, `parts_of(...) * shards` of them.
    """

    def __init__(self, source: Any, epochs: Epochs, stream: int, streams: int):
        self.source, self.epochs, self.streams = source, epochs, streams
        self.parts = epochs.n // source.shards
        self.rows = WINDOW * self.parts
        self.epoch, self.shard = divmod(stream, epochs.n)
        self._enter(row=0, document=0)

    def state(self) -> dict[str, int]:
        """The epoch, the place in its order of shards, the first row and the place of a window."""
        return {
            "epoch": self.epoch, "shard": self.shard, "row": self.row, "document": self.document,
        }  # fmt: skip

    def load_state(self, state: dict[str, int]) -> None:
        self.epoch, self.shard = state["epoch"], state["shard"]
        self._enter(state["row"], state["document"])

    def read(self) -> str:
        """The document at this place, or the next one where a window or a shard has ended."""
        while True:
            if self._window is None:
                self._window = self._read_window()
            if self._window is None:
                place = self.epoch * self.epochs.n + self.shard + self.streams
                self.epoch, self.shard = divmod(place, self.epochs.n)
                self._enter(row=0, document=0)
            elif self.document < len(self._window):
                return self._window[self.document]
            else:
                self.row, self.document, self._window = self.row + self.rows, 0, None

    def advance(self) -> None:
        self.document += 1

    def _enter(self, row: int, document: int) -> None:
        self.row, self.document = row, document
        self._window: list[str] | None = None
        self._windows: Iterator[list[str]] | None = None

    def _read_window(self) -> list[str] | None:
        """This stream's documents of the window that begins at `row`; None behind the last."""
        number = self.epochs.order(self.epoch)[self.shard]
        shard, part = divmod(number, self.parts)
        if self._windows is None:
            self._windows = self.source.windows(shard, self.row, self.rows)
        window = next(self._windows, None)
        if window is None:
            return None
        mine = window[part :: self.parts]
        random.Random(f"{self.epochs.seed}/{self.epoch}/{number}/{self.row}").shuffle(mine)
        return mine


def parts_of(shards: int, streams: int) -> int:
    """Into how many parts a shard is divided so that every stream has one."""
    return -(-streams // shards)
