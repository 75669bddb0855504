"""Which files hold text, what their documents are, and what is refused, for whoever reads them."""

import csv
import gzip
import hashlib
import io
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_models
import training_runs  # noqa: F401 (the recipes on the path)

from hf_sigmoid.training import data_sets  # isort: skip
from hf_sigmoid import text
from hf_sigmoid.errors import BadInput
from hf_sigmoid.text import sources
from hf_sigmoid.text.documents import Reading, documents
from hf_sigmoid.text.formats import find, format_of

DOCUMENTS = ['Emma, "clever"', "Wood\nhouse\u2028\t", "ä" * 40, "\U0001f600 a\x00b"]
BOM = b"\xef\xbb\xbf"


def lines(rows=DOCUMENTS) -> bytes:
    return "".join(json.dumps({"n": 1, "text": each}) + "\n" for each in rows).encode()


def table(delimiter: str) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerows([["text", "n"], *([each, 1] for each in DOCUMENTS)])
    return out.getvalue().encode()


def objects() -> list[dict]:
    return [{"text": each, "n": 1} for each in DOCUMENTS]


def packed(name: str, content: bytes) -> bytes:
    if name.lower().endswith(".gz"):
        return gzip.compress(content)
    return pa.compress(content, codec="zstd", asbytes=True) if name.endswith(".zst") else content


def columns(texts: list, name: str = "text") -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"n": range(len(texts)), name: texts}), out)
    return out.getvalue()


FORMS = {
    "a.jsonl": lines(), "a.ndjson": lines(), "A.JSONL": lines(), "a.b.NdJson": lines(),
    "a.jsonl.txt": lines(), "a.JSONL.TXT": lines(), "a.jsonl.gz": lines(),
    "a.JSONL.GZ": lines(), "a.ndjson.zst": lines(), "bom.jsonl": BOM + lines(),
    "blank.jsonl": lines().replace(b"\n", b"\n\n \r\n"),
    "lines.json": lines(), "list.json": json.dumps(objects(), indent=1).encode(),
    "strings.json": json.dumps(DOCUMENTS).encode(),
    "data.json": json.dumps({"version": 1, "data": objects()}).encode(),
    "column.json": json.dumps({"text": DOCUMENTS}).encode(),
    "bom.json": BOM + json.dumps(objects()).encode(),
    "list.JSON.gz": json.dumps(objects()).encode(),
    "a.csv": table(","), "a.CSV": table(","), "bom.csv": BOM + table(","), "a.csv.zst": table(","),
    "a.tsv": table("\t"), "a.tsv.gz": table("\t"), "a.csv.txt": table(","),
    "a.parquet": columns(DOCUMENTS), "a.PARQUET": columns(DOCUMENTS),
}  # fmt: skip


def write(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(packed(name, content))
    return folder / name


def read(file: Path, **options) -> list[str]:
    return list(documents(file, Reading("data.path", prefix="data.", **options)))


@pytest.mark.parametrize("name", FORMS)
def test_a_format_is_read_as_its_documents(tmp_path, name):
    file = write(tmp_path, name, FORMS[name])
    assert [each for each in read(file) if each] == DOCUMENTS
    joined = sources.joined(file, "the text")
    assert joined == "\n\n".join(DOCUMENTS)


@pytest.mark.parametrize("name", ["a.txt", "a.TXT", "a.md", "a.txt.gz", "a.Txt.zst", "README"])
def test_a_text_is_one_document(tmp_path, name):
    for start in (b"", BOM):
        file = write(tmp_path, name, start + b"# Emma\r\n\n{Wood} house\rlast")
        assert read(file) == ["# Emma\n\n{Wood} house\nlast"]


def test_one_object_is_one_document_and_an_empty_file_none(tmp_path):
    assert read(write(tmp_path, "a.json", b'{"text": "one",\n "lists": [1]}')) == ["one"]
    for name in ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.jsonl.gz"):
        assert read(write(tmp_path, name, b"")) == []


def test_long_cells_and_lines_are_whole(tmp_path):
    long = "word " * 100_000
    assert read(write(tmp_path, "a.csv", f"text\n{long}\n".encode())) == [long]


@pytest.mark.parametrize(
    "name",
    ["a.html", "a.jsonl.bak", "a.py", "a.parquet.gz", "a.gz", "a.txt~", "a.jsonl.zip", "a.7"],
)
def test_another_format_is_refused_with_those_that_are_read(tmp_path, name):
    file = write(tmp_path, name, lines())
    with pytest.raises(BadInput, match=r"^data\.path: cannot read .*: expected one of .*\.ndjson"):
        find(str(file), "data.path")
    assert find(tmp_path, "data.path") == []


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "a"}\n[1]\n', "a.jsonl line 2 has no key 'text' (data.field)"),
        ("a.jsonl", b'{"text": "a"}\n\n{"n": 1}\n', "line 3 has no key 'text' (data.field)"),
        ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}", "a.jsonl line 1 is not JSON: "),
        ("a.jsonl", b'{"text": ' + b"[" * 200_000, "a.jsonl line 1 is not JSON: "),
        ("a.json", b'{"text": "a"}\n{"text": }\n', "a.json line 2 is not JSON"),
        ("a.json", b'[{"text": "a"},\n{"text": }]', "a.json is not JSON: Expecting value: line 2"),
        ("a.json", b'[{"text": "a"}, {"n": 1}]', "a.json item 2 has no key 'text'"),
        ("a.json", b'[{"text": "a"}, {"text": 3}]', "a.json item 2: 'text' is not text but int"),
        ("a.json", b'{"a": [1], "b": [2]}', "a.json has no rows: expected a list of objects"),
        ("a.json", b"3", "a.json has no rows"),
        ("a.csv", b"Emma\nhandsome\n", "no column 'text' (data.field); its columns are Emma"),
        ("a.csv", b"body,n\na,1\n", "its columns are body, n"),
        ("a.csv", b"text;n\na;1\n", "its columns are text;n"),
        ("a.csv", b"text,n\na,b,1\n", "a.csv line 2 has 3 cells, expected 2"),
        ("a.csv", b'text,n\n"a\nb,1\n', "a.csv line 3 is not CSV: unexpected end of data"),
        ("a.csv", b'text,n\n"a"b,1\n', "a.csv line 2 is not CSV"),
        ("a.csv", b"text,n\na,1\n\xff,2\n", "a.csv line 3 is not UTF-8 text"),
        ("a.txt", b"a\nb\n\xff", "a.txt is not UTF-8 text: 'utf-8' codec"),
        ("a.txt", b"a\nb\n\xff", "(line 3); data.bad_text=replace reads it as U+FFFD"),
        ("a.txt", "Emma".encode("utf-16"), "a.txt is not UTF-8 text: it begins like UTF-16"),
        ("a.txt", "Emma".encode("utf-16-le"), "it begins like UTF-16"),
        ("a.txt", "Emma".encode("utf-32-be"), "it begins like UTF-16 or UTF-32"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16-be"), "it begins like UTF-16"),
        ("a.csv", "text\na\n".encode("utf-16"), "it begins like UTF-16"),
        ("rows", lines(), "rows holds JSON: expected .jsonl or .json behind its name"),
        ("rows", b'\n[{"text": "a"}]', "rows holds JSON"),
        ("a.parquet", columns(["a"], "body"), "no column 'text' (data.field); its columns"),
        ("a.parquet", b"", "a.parquet is not Parquet"),
        ("a.parquet", columns([1]), "a.parquet: 'text' is not text but int64"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, words):
    file = write(tmp_path, name, content)
    with pytest.raises(BadInput) as error:
        read(file)
    assert str(error.value).startswith("data.path: ") and words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("cut", [True, False])
def test_a_broken_compression_is_named(tmp_path, name, cut):
    whole = packed(name, os.urandom(50_000).hex().encode() + b"\n")
    (tmp_path / name).write_bytes(whole[: len(whole) // 2] if cut else b"no archive at all")
    with pytest.raises(BadInput, match=rf"^data\.path: cannot read .*{name}: "):
        read(tmp_path / name)


HALF = "half \\ud83d of a pair"
NOT_UNICODE = {
    "a.jsonl": (f'{{"text": "a"}}\n\n{{"text": "{HALF}"}}\n', "line 3"),
    "a.jsonl.gz": (f'{{"text": "{HALF}"}}\n', "line 1"),
    "lines.json": (f'{{"text": "a"}}\n{{"text": "{HALF}"}}\n', "line 2"),
    "a.json": (f'[{{"text": "a"}}, {{"text": "{HALF}"}}]', "item 2"),
    "strings.json": (f'["a", "{HALF}"]', "item 2"),
    "one.json": (f'{{"text": "{HALF}"}}', "item 1"),
    "low.jsonl": ('{"text": "half \\udc80 of a pair"}\n', "line 1"),
    "order.jsonl": ('{"text": "\\ude00\\ud83d"}\n', "line 1"),
}


@pytest.mark.parametrize("name", NOT_UNICODE)
def test_half_a_surrogate_pair_is_refused_with_its_place_or_replaced(tmp_path, name):
    content, place = NOT_UNICODE[name]
    file = write(tmp_path, name, content.encode())
    with pytest.raises(BadInput) as error:
        read(file)
    said = str(error.value)
    assert said.startswith(f"data.path: {file} {place} has half a surrogate pair, '\\ud")
    assert said.endswith("; data.bad_text=replace reads it as U+FFFD")
    replaced = read(file, bad_text="replace")[-1]
    assert replaced in ("half \ufffd of a pair", "\ufffd\ufffd")
    with pytest.raises(BadInput, match=rf"^the text: .* {place} has half .* no Unicode$"):
        sources.joined(file, "the text")


def test_a_whole_pair_and_half_of_one_in_another_field_are_no_bad_text(tmp_path):
    content = b'{"text": "\\ud83d\\ude00", "\\ud83d": "\\ude00", "title": "\\ud83d"}\n'
    assert read(write(tmp_path, "a.jsonl", content)) == ["\U0001f600"]
    with pytest.raises(BadInput, match="its keys are") as error:
        read(tmp_path / "a.jsonl", field="body")
    str(error.value).encode("utf-8", "backslashreplace")  # as stderr writes it


@pytest.mark.parametrize("name", ["a.txt", "a.txt.zst", "a.jsonl", "a.csv", "a.json", "a.parquet"])
def test_bytes_that_are_not_utf_8_are_replaced(tmp_path, name):
    bad = b"a \xed\xa0\xbd\xff b"
    if name == "a.parquet":
        values = pa.array([b"a", bad]).view(pa.string())
        content = columns(values)
        place = r"a\.parquet row 2 is not UTF-8"
    else:
        wrap = {".jsonl": b'{"text": "%s"}\n', ".csv": b"text\n%s\n", ".json": b'["%s"]'}
        content = wrap.get(format_of(Path(name)), b"%s") % bad
        place = "is not UTF-8 text"
    file = write(tmp_path, name, content)
    with pytest.raises(BadInput, match=place):
        read(file)
    assert read(file, bad_text="replace")[-1] == "a \ufffd\ufffd\ufffd\ufffd b"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two documents that are meant, and what programs leave beside them."""
    found = tmp_path / "corpus"
    for name in ("b.jsonl", "deep/a.JSONL"):
        write(found, name, lines([name]))
    for name in (
        ".ipynb_checkpoints/b-checkpoint.jsonl", "._b.jsonl", "deep/._a.JSONL", ".git/x.txt",
        ".cache/huggingface/b.jsonl", "deep/.DS_Store", ".hidden.jsonl", "deep/.a.jsonl.swp",
    ):  # fmt: skip
        write(found, name, b"\x00\x05\x16\x07 \xff")
    write(found, "README.md", b"# A card")
    write(found, "dataset_infos.json", b"{}")
    write(found, "LICENSE", b"all rights")
    write(found, "picture.png", b"\xff")
    (found / "empty.txt").mkdir()
    (found / "deep" / "loop").symlink_to(found)
    (found / "loop.txt").symlink_to("loop.txt")
    return found


def names(found: list[Path]) -> list[str]:
    return [file.name for file in found]


def test_a_folder_is_its_text_without_what_is_hidden(folder, monkeypatch):
    assert names(find(folder, "data.path")) == ["b.jsonl", "a.JSONL"]
    assert names(find(folder, "", with_markdown=True)) == ["b.jsonl", "a.JSONL"]
    monkeypatch.chdir(folder)
    assert names(find(".", "")) == names(find("deep/..", "")) == ["b.jsonl", "a.JSONL"]


def test_what_is_hidden_is_read_where_it_is_named(folder):
    write(folder, ".ipynb_checkpoints/more/c.jsonl", lines(["c"]))
    found = find([f"{folder}/.ipynb_checkpoints", f"{folder}/._b.jsonl"], "")
    assert names(found) == ["b-checkpoint.jsonl", "c.jsonl", "._b.jsonl"]


def test_overlapping_paths_are_read_once(folder, tmp_path):
    given = [folder / "deep", folder, folder / "b.jsonl", f"{folder}/deep/../b.jsonl"]
    assert names(find(given, "")) == ["a.JSONL", "b.jsonl"]
    (tmp_path / "link").symlink_to(folder)
    assert names(find([folder, tmp_path / "link"], "")) == ["b.jsonl", "a.JSONL"]


def test_a_pattern_is_the_files_that_it_fits(folder):
    assert names(find(f"{folder}/*.jsonl", "")) == ["b.jsonl"]
    assert names(find(f"{folder}/**/[ab].[jJ]*", "")) == ["b.jsonl", "a.JSONL"]
    write(folder, "b[1].txt", b"a name, no pattern")
    assert names(find(f"{folder}/b[1].txt", "")) == ["b[1].txt"]
    with pytest.raises(BadInput, match=r"^data\.path: no such file: .*\*\.csv"):
        find(f"{folder}/*.csv", "data.path")


@pytest.mark.parametrize(
    ("files", "run", "conversion"),
    [
        ("a.md b.txt", "b.txt", "a.md b.txt"),
        ("README.md b.json", "b.json", "b.json"),
        ("a.json b.json", "a.json b.json", "a.json b.json"),
        ("a.md b.csv c.json", "b.csv", "b.csv"),
        ("a.ndjson b.jsonl c.TSV d.txt.gz", "a.ndjson b.jsonl c.TSV d.txt.gz", None),
    ],
)
def test_markdown_and_json_are_text_where_nothing_else_is(tmp_path, files, run, conversion):
    for name in files.split():
        write(tmp_path, name, b"")
    assert names(find(tmp_path, "")) == run.split()
    assert names(find(tmp_path, "", with_markdown=True)) == (conversion or run).split()


def test_what_a_folder_is_read_without_is_named(tmp_path):
    for name in ("a.jsonl", "b.json", "README.md"):
        write(tmp_path, name, b"")
    with pytest.warns(UserWarning, match=r"is read without README.md, b.json; name them"):
        assert names(find(tmp_path, "data.path")) == ["a.jsonl"]


def test_texts_beside_rows_leave_open_what_is_meant(tmp_path):
    for name in ("essay.md", "b.json"):
        write(tmp_path, name, b"")
    with pytest.raises(BadInput, match=r"holds \.md and \.json files: name those"):
        find(tmp_path, "data.path")


@pytest.mark.parametrize("given", ["", [""], ["a.txt", ""]])
def test_an_empty_path_is_not_the_working_folder(given, tmp_path, monkeypatch):
    write(tmp_path, "a.txt", b"notes")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"data\.path: expected a path, got an empty one"):
        find(given, "data.path")


@pytest.mark.parametrize("name", ["fake.txt", "fake.md", "fake.txt.gz", "fake"])
def test_json_lines_under_the_name_of_a_text_are_refused(tmp_path, name):
    content = lines(["one", "two"])
    write(tmp_path, name, content)
    with pytest.raises(BadInput, match=r"holds JSON: expected \.jsonl"):
        list(documents(tmp_path / name, Reading("data.path")))


def test_a_line_of_json_may_be_the_text_itself(tmp_path):
    write(tmp_path, "a.jsonl", b'"one"\n{"text": "two"}\n')
    assert list(documents(tmp_path / "a.jsonl", Reading("data.path"))) == ["one", "two"]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_half_a_pair_in_a_data_set_here_is_refused(tmp_path, name):
    """The library drops it without a word."""
    rows = '{"text": "whole"}\n{"text": "half \\ud83d of it"}\n'
    content = rows if name == "a.jsonl" else f"[{rows.strip().replace(chr(10), ',')}]"
    write(tmp_path, f"set/{name}", content.encode())
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer = tiny_models.byte_tokenizer()
        given = f"dataset:{tmp_path / 'set' / name}"
        sources.read(given, text.train, "calibration", tokenizer, 10**6)
    for choice in ("refuse", "replace"):
        with pytest.raises(BadInput, match=r"expected its files as data\.path"):
            reading = Reading("data.dataset", "text", choice, "data.")
            data_sets.named(str(tmp_path / "set"), None, "train", None, reading, streaming=False)


def test_a_conversion_reads_documents_whatever_holds_them(tmp_path):
    write(tmp_path, "texts/a.jsonl", lines(["one", " ", "two"]))
    write(tmp_path, "texts/b.txt", b"three")

    def content(given):
        return sources.read(given, text.train, "calibration", tiny_models.byte_tokenizer(), 10)

    for given in (tmp_path / "texts", str(tmp_path / "texts" / "*")):
        assert content(given).content == "one\n\ntwo\n\nthree"
    found = content(str(tmp_path / "texts" / "a.jsonl"))
    assert (found.name, found.content) == ("a.jsonl", "one\n\ntwo")
    assert found.sha256 == hashlib.sha256(b"one\n\ntwo").hexdigest()
    tsv = write(tmp_path, "a.TSV", b"text\tn\none\t1\n")
    assert content(f"dataset:{tsv}").content == "one"
    half = write(tmp_path, "half.jsonl", b'{"text": "\\ud83d"}\n')
    for given in (half, f"dataset:{half}"):
        with pytest.raises(ValueError, match=r"^the calibration text: .*half\.jsonl.* surrogate"):
            content(given)


def test_a_name_that_is_not_utf_8_can_be_written(tmp_path):
    file = tmp_path / os.fsdecode(b"caf\xe9.txt")
    file.write_text("coffee")
    found = sources.read(file, text.train, "calibration", None, 10)
    assert found.name.encode() == b"caf\\udce9.txt" and found.content == "coffee"
