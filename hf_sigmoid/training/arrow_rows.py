"""The documents of data sets of the `datasets` library: rows by index, or streams by windows."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hf_sigmoid.errors import BadInput
from hf_sigmoid.text.documents import Reading, in_column

# Up to so many documents all are read at the start: what is not text ends the run before it begins,
# and blank ones are left out. Of more, a sample is read, and the packer passes over blanks.
ALL_READ = 1_000_000
# pandas and pyarrow raise these for files that are not what they are called; a broken connection
# is an OSError and no mistake of the corpus.
_BROKEN_FILE = (ValueError, TypeError, KeyError)


class Stored(Sequence):
    """The documents of a data set in memory-mapped Arrow files, which every process shares.

    Args:
        name: of what they are rows of, in an error.
    """

    def __init__(self, rows: Any, reading: Reading, name: str):
        self.rows = rows.select_columns(reading.field).with_format("arrow")
        self.reading, self.name = reading, name
        if len(rows) <= ALL_READ and (blank := self._blank()).any():
            self.rows = self.rows.select(np.flatnonzero(~blank))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> str:
        return self._texts(self.rows[index], index)[0]

    def _texts(self, table: Any, first: int) -> list[str]:
        return list(in_column(table.column(0), self.name, first + 1, self.reading))

    def _blank(self) -> np.ndarray:
        """A mask of the rows that hold nothing but white space, or null."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found, first = [np.empty(0, bool)], 0
        for table in self.rows.iter(batch_size=10_000):
            try:
                trimmed = pc.utf8_trim_whitespace(table.column(0))
            except pa.ArrowInvalid:  # bytes that are not UTF-8; only Python says which
                texts = self._texts(table, first)
                found.append(np.array([not text.strip() for text in texts]))
            else:
                blank = pc.fill_null(pc.equal(pc.binary_length(trimmed), 0), True)
                found.append(blank.to_numpy(zero_copy_only=False))
            first += len(table)
        return np.concatenate(found)


class Shards:
    """The documents of a streamed data set, an `IterableDataset`, shard by shard."""

    def __init__(self, rows: Any, reading: Reading):
        self.rows = rows.select_columns(reading.field).with_format("arrow")
        self.reading, self.shards = reading, rows.num_shards

    def windows(self, shard: int, first: int, rows: int) -> Iterator[list[str]]:
        """The texts of `rows` rows at a time, from row `first` on, a multiple of `rows`.

        Raises:
            BadInput: for a shard that cannot be read as far as that.
        """
        batches = self.rows.shard(self.shards, shard).iter(batch_size=rows)
        try:
            for number, table in enumerate(itertools.islice(batches, first // rows, None)):
                yield self._texts(table.column(0), shard, first + number * rows)
        except BadInput:
            raise
        except _BROKEN_FILE as error:
            raise self.reading.error(f"cannot read shard {shard}: {first_line(error)}") from error

    def _texts(self, column: Any, shard: int, first: int) -> list[str]:
        import pyarrow.types as kinds

        kind = column.type
        if not (kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_null(kind)):
            said = f"shard {shard}: {self.reading.field!r} is not text but {kind}"
            raise self.reading.error(said)
        return list(in_column(column, f"shard {shard}", first + 1, self.reading))


def first_line(error: BaseException) -> str:
    """The first line that an error says."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
