"""The documents of a file, whatever its format, and what becomes of text that is none.

Text is Unicode that UTF-8 can write. Bytes that are not UTF-8, and halves of surrogate pairs, which
JSON can name (`"\\ud83d"`) and no tokenizer takes, are refused with file and line, or replaced by
U+FFFD.
"""

import csv
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hf_sigmoid.errors import BadInput
from hf_sigmoid.text.formats import format_of, open_unpacked

REFUSE, REPLACE = "refuse", "replace"
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_BOM = b"\xef\xbb\xbf"
_UTF_16_OR_32 = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")


@dataclass(frozen=True)
class Reading:
    """The way that text is read, and its name in errors.

    Attributes:
        key: of what was asked for: "data.path", "the haystack text".
        field: the key or column of the text in a row.
        bad_text: REFUSE or REPLACE.
        prefix: of the keys that choose `field` and `bad_text`, "data."; None where there are none.
        null_is_blank: whether null in the place of a text is an empty document, or an error.
    """

    key: str
    field: str = "text"
    bad_text: str = REFUSE
    prefix: str | None = None
    null_is_blank: bool = False

    def error(self, message: str) -> BadInput:
        return BadInput(f"{self.key}: {message}")

    def no_field(self, where: object, what: str, known: Iterable[Any]) -> BadInput:
        """For a row without the field; `what` is what it has instead, "key" or "column"."""
        names = ", ".join(sorted(str(name)[:40] for name in known)[:20]) or "none"
        chosen = f" ({self.prefix}field)" if self.prefix else ""
        return self.error(f"{where} has no {what} {self.field!r}{chosen}; its {what}s are {names}")

    def bad(self, where: object, what: str) -> BadInput:
        choice = f"; {self.prefix}bad_text={REPLACE} reads it as U+FFFD" if self.prefix else ""
        return self.error(f"{where} {what}{choice}")

    def decoded(self, content: bytes, where: object) -> str:
        """Bytes of a file as text."""
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            if self.bad_text == REPLACE:
                return content.decode("utf-8", errors="replace")
            line = 1 + content.count(b"\n", 0, error.start)
            at = f" (line {line})" if line > 1 else ""
            raise self.bad(where, f"is not UTF-8 text: {error}{at}") from None

    def checked(self, value: Any, where: object) -> str:
        """A value of a row, which is to be text.

        Args:
            where: the file and the line; turned into a string for an error only.
        """
        if value is None and self.null_is_blank:
            return ""
        if not isinstance(value, str):
            raise self.error(f"{where}: {self.field!r} is not text but {type(value).__name__}")
        if value.isascii() or not (half := _HALF_PAIR.search(value)):
            return value
        if self.bad_text == REPLACE:
            return _HALF_PAIR.sub("\ufffd", value)
        raise self.bad(
            where,
            f"has half a surrogate pair, {half.group()!r} at character {half.start() + 1} of its "
            "text, which is no Unicode",
        )


def documents(file: Path, reading: Reading) -> Iterator[str]:
    """The documents of a file in their order, blank ones among them.

    Raises:
        BadInput: for a file that cannot be read, with the line where it has lines.
    """
    known = format_of(file)
    try:
        if known == ".parquet":
            yield from _columns(file, reading)
        else:
            with open_unpacked(file) as stream:
                stream.read(text_start(stream.peek(64)[:64], file, reading))
                yield from _READERS[known](stream, file, reading)
    except ImportError as error:
        raise reading.error(
            f"reading {file} needs the package {error.name}: pip install 'hf-sigmoid[recipes]'"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise reading.error(f"cannot read {file}: {why}") from None


def text_start(head: bytes, file: Path, reading: Reading) -> int:
    """Where the text of a file begins, behind a byte order mark; `head` is its first 64 bytes."""
    # Another encoding is no text with some bad bytes in it. ASCII in UTF-16 is every second byte 0.
    zeros = max(head[::2].count(0), head[1::2].count(0))
    if head.startswith(_UTF_16_OR_32) or 3 * len(head) < 8 * zeros:
        raise reading.error(f"{file} is not UTF-8 text: it begins like UTF-16 or UTF-32")
    return len(_BOM) if head.startswith(_BOM) else 0


def plain(content: bytes, file: Path, reading: Reading) -> str:
    """A file that is one document."""
    text = reading.decoded(content, file)
    if text.lstrip()[:1] in ("{", "["):
        try:
            first = json.loads(text.lstrip().split("\n", 1)[0])
        except (ValueError, RecursionError):
            first = None
        # Of a file that is called text only rows of this very field are surely none.
        is_rows = isinstance(first, dict) and reading.field in first
        if is_rows or (first is not None and format_of(file) == ""):
            raise reading.error(f"{file} holds JSON: expected .jsonl or .json behind its name")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def json_line(content: bytes, where: object, reading: Reading) -> str:
    """The document in a line of JSON; in a blank one, none."""
    line = reading.decoded(content, where)
    return _in_object(_parsed(line, where, reading), where, reading) if line.strip() else ""


def in_column(column: Any, where: str, first: int, reading: Reading) -> Iterator[str]:
    """The documents of an Arrow column of strings, null being none.

    Args:
        where: the rows are in, as errors call it.
        first: the number of its first row.
    """
    import pyarrow

    # Arrow does not look whether a string that it reads is UTF-8, and cannot give one that is not.
    for number, value in enumerate(column.cast(pyarrow.large_binary()).to_pylist(), first):
        yield "" if value is None else reading.decoded(value, f"{where} row {number}")


def check_parquet(file: Path, reading: Reading) -> int:
    """The number of rows of a Parquet file that has text in the column of that name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as opened:
            schema, rows = opened.schema_arrow, opened.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise reading.error(f"{file} is not Parquet: {why}") from None
    if reading.field not in schema.names:
        raise reading.no_field(file, "column", schema.names)
    kind = schema.field(reading.field).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise reading.error(f"{file}: {reading.field!r} is not text but {kind}")
    return rows


def _columns(file: Path, reading: Reading) -> Iterator[str]:
    check_parquet(file, reading)
    import pyarrow.parquet as pq

    first = 1
    with pq.ParquetFile(file) as opened:
        for batch in opened.iter_batches(columns=[reading.field], batch_size=1000):
            yield from in_column(batch.column(0), str(file), first, reading)
            first += len(batch)


def _whole(stream: BinaryIO, file: Path, reading: Reading) -> Iterator[str]:
    yield plain(stream.read(), file, reading)


def _lines(stream: Iterable[bytes], file: Path, reading: Reading) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        # A blank line is no row, so that it does not count where rows are counted.
        if line.strip():
            yield json_line(line, f"{file} line {number}", reading)


def _json(stream: BinaryIO, file: Path, reading: Reading) -> Iterator[str]:
    content = stream.read()
    text = reading.decoded(content, file)
    if not text.strip():
        return
    try:
        rows = _rows(json.loads(text), reading.field)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise reading.error(f"{file} is not JSON: {error}") from None
        yield from _lines(io.BytesIO(content), file, reading)
        return
    except (ValueError, RecursionError) as error:
        raise reading.error(f"{file} is not JSON: {error}") from None
    if rows is None:
        raise reading.error(
            f"{file} has no rows: expected a list of objects or of strings, alone or as the only "
            f"list of an object, or an object with the key {reading.field!r}"
        )
    for number, row in enumerate(rows, 1):
        where = f"{file} item {number}"
        yield _in_object(row, where, reading)


def _rows(content: Any, field: str) -> list[Any] | None:
    """The rows of a JSON file; None if there are none to be seen."""
    if isinstance(content, list):
        return content
    if not isinstance(content, dict):
        return None
    if field in content:
        return content[field] if isinstance(content[field], list) else [content]
    lists = [value for value in content.values() if isinstance(value, list)]
    return lists[0] if len(lists) == 1 else None


def _cells(stream: Iterable[bytes], file: Path, reading: Reading) -> Iterator[str]:
    csv.field_size_limit(2**31 - 1)  # a document is longer than a cell usually is
    # Decoded by the line, so that a bad one has its number.
    lines = (reading.decoded(each, f"{file} line {n}") for n, each in enumerate(stream, 1))
    rows = csv.reader(lines, delimiter="\t" if format_of(file) == ".tsv" else ",", strict=True)
    header: list[str] | None = None
    try:
        for row in filter(None, rows):
            where = f"{file} line {rows.line_num}"
            if header is None:
                header = row
                if reading.field not in header:
                    raise reading.no_field(file, "column", header)
            elif len(row) != len(header):
                raise reading.error(f"{where} has {len(row)} cells, expected {len(header)}")
            else:
                yield row[header.index(reading.field)]
    except csv.Error as error:
        raise reading.error(f"{file} line {rows.line_num} is not CSV: {error}") from None


def _in_object(row: Any, where: object, reading: Reading) -> str:
    if isinstance(row, str):
        return reading.checked(row, where)
    if not isinstance(row, dict) or reading.field not in row:
        raise reading.no_field(where, "key", row if isinstance(row, dict) else ())
    return reading.checked(row[reading.field], where)


def _parsed(text: str, where: object, reading: Reading) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise reading.error(f"{where} is not JSON: {error}") from None


_READERS = {
    "": _whole, ".txt": _whole, ".md": _whole, ".jsonl": _lines, ".json": _json,
    ".csv": _cells, ".tsv": _cells,
}  # fmt: skip
