"""The corpus of a run and its blocks: what is read, in which order, and that it can go on."""

import collections
import hashlib
import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

RECIPES = Path(__file__).parents[1] / "recipes"
sys.path.insert(0, str(RECIPES))

from hf_sigmoid import text  # noqa: E402
from hf_sigmoid.errors import BadInput  # noqa: E402
from hf_sigmoid.training import (  # noqa: E402
    arrow_rows,
    corpus,
    held_out,
    packing,
    reading_order,
    run_config,
    run_keys,
)


def opened(**keys) -> corpus.Corpus:
    return corpus.open_corpus(run_config.checked(run_keys.Data, keys, "data"))


def codes(document: str) -> list[int]:
    """A token a letter."""
    return [ord(letter) for letter in document]


class Streamed:
    """Shards in memory, as `data_sets.Shards` gives them."""

    def __init__(self, shards: list[list[str]]):
        self.rows, self.shards = shards, len(shards)

    def windows(self, shard, first, rows):
        for start in range(first, len(self.rows[shard]), rows):
            yield self.rows[shard][start : start + rows]


class Sources:
    """A corpus of sources as they are."""

    def __init__(self, *sources, weights=(1.0,)):
        self.sources, self.weights = sources, weights


def packer(source, block_size=8, seed=0, streams=1, mine=None) -> packing.Packer:
    found = source if hasattr(source, "sources") else Sources(source)
    mine = range(streams) if mine is None else mine
    return packing.Packer(found, codes, block_size, seed, streams=streams, mine=mine)


def take(of: packing.Packer, blocks: int, stream: int = 0) -> list[packing.Block]:
    return [of.next_block(stream) for _ in range(blocks)]


# The code points are tokens: some documents are empty or white space, which is passed over.
TEXTS = st.lists(st.text("ab \n", max_size=9), min_size=1, max_size=7).filter(
    lambda texts: any(each.strip() for each in texts)
)


@given(TEXTS, st.integers(2, 12), st.integers(0, 3), st.integers(1, 4))
def test_packing_loses_no_token_and_labels_none_across_documents(texts, block_size, seed, streams):
    orders = [reading_order.permutation(len(texts), f"{seed}/{epoch}") for epoch in range(4)]
    places = [texts[index] for order in orders for index in order]
    of = packer(texts, block_size, seed, streams)
    for stream in range(streams):
        expected, starts = [], {0}
        for tokens in map(codes, filter(str.strip, places[stream::streams])):
            expected += zip(tokens, [*tokens[1:], packing.IGNORED], strict=True)
            starts.add(len(expected))
        for first in range(0, len(expected) - block_size + 1, block_size):
            block = of.next_block(stream)
            rows = list(zip(block.input_ids, block.labels, strict=True))
            assert rows == expected[first : first + block_size]
            position = -1
            for place, given_position in enumerate(block.position_ids):
                position = 0 if place == 0 or first + place in starts else position + 1
                assert given_position == position


def test_the_order_of_one_stream_is_the_committed_runs():
    """Python's own shuffle by "seed/epoch"; what is in recipes/ was trained in this order."""
    of = packer(["a", "bb", "ccc", "dddd", "eeeee"], 15, seed=3)
    found = ["".join(map(chr, block.input_ids)) for block in take(of, 3)]
    assert found == ["bbacccddddeeeee", "bbcccaddddeeeee", "cccbbaeeeeedddd"]


def divisions(blocks: int, streams: int):
    return [
        (ranks, batch_size, blocks // ranks // batch_size)
        for ranks in (1, 2, 3, 4, 6, 12)
        for batch_size in (1, 2, 3, 4)
        if streams % ranks == 0 and blocks % (ranks * batch_size) == 0
    ]


@pytest.mark.parametrize("streams", [1, 2, 3, 4, 12])
def test_a_step_has_the_same_blocks_however_it_is_divided(streams):
    texts = [chr(97 + i) * (1 + i % 7) for i in range(26)]

    def rows(ranks, batch_size, grad_accumulation):
        found = [[], [], []]  # of three steps
        for rank in range(ranks):
            mine = packing.streams_of(rank, ranks, streams)
            of = packer(texts, 8, 0, streams, mine)
            assert list(of.state()) == [str(stream) for stream in mine]
            for step in found:
                batches = packing.step_batches(of, batch_size, grad_accumulation)
                assert [len(batch["labels"]) for batch in batches] == (
                    [batch_size] * grad_accumulation
                )
                step += [list(zip(*(b[k].tolist() for k in b), strict=True)) for b in batches]
        return [[row for batch in step for row in batch] for step in found]

    ways = divisions(12, streams)
    assert len(ways) > 3
    whole = rows(1, 12, 1)
    assert all(rows(*way) == whole for way in ways)


def test_no_document_belongs_to_two_streams():
    texts = [chr(97 + i) * 4 for i in range(12)]
    of = packer(texts, 4, 0, 3)
    found = [{block.input_ids[0] for block in take(of, 4, stream)} for stream in range(3)]
    assert sum(map(len, found)) == len(set.union(*found)) == 12


def test_there_may_be_fewer_documents_than_streams():
    of = packer(["a", "b"], 2, 0, 5)
    for stream in range(5):
        assert {tuple(block.input_ids) for block in take(of, 12, stream)} >= {(97, 97), (98, 98)}


@given(st.integers(1, 300), st.integers(0, 5))
def test_a_permutation_without_a_list_has_every_place_once(n, seed):
    found = list(reading_order.Feistel(n, f"{seed}"))
    assert sorted(found) == list(range(n))


def test_a_permutation_without_a_list_looks_random():
    """Places, neighbours and seeds tell nothing: each count is within 5 σ of chance."""
    n, bins = 100_003, 16
    order = list(reading_order.Feistel(n, "0/0"))
    other = list(reading_order.Feistel(n, "0/1"))
    pairs = [
        [(i * bins // n, x * bins // n) for i, x in enumerate(order)],
        [(x * bins // n, y * bins // n) for x, y in itertools.pairwise(order)],
        [(x * bins // n, y * bins // n) for x, y in zip(order, other, strict=True)],
        [(x % bins, y % bins) for x, y in itertools.pairwise(order)],
    ]
    expected = n / bins**2
    for each in pairs:
        counts = collections.Counter(each)
        assert len(counts) == bins**2
        assert max(abs(c - expected) for c in counts.values()) < 5 * expected**0.5
    assert sum(x == y for x, y in zip(order, other, strict=True)) < 8


def test_many_documents_are_permuted_without_a_list(monkeypatch):
    monkeypatch.setattr(reading_order, "SHUFFLED", 20)
    texts = [chr(97 + i) for i in range(26)]
    going = packer(texts, 26)
    first, second = ("".join(map(chr, b.input_ids)) for b in take(going, 2))
    assert sorted(first) == sorted(second) == texts and first != second
    assert isinstance(reading_order.permutation(21, "0"), reading_order.Feistel)
    resumed = packer(texts, 26)
    resumed.load_state(going.state())
    assert take(resumed, 2) == take(going, 2)


@pytest.mark.parametrize("kind", ["documents", "shards"])
def test_every_epoch_and_seed_has_an_order_of_its_own(kind):
    texts = [chr(97 + i) for i in range(24)]
    source = texts if kind == "documents" else Streamed([texts[:7], texts[7:8], texts[8:]])
    epochs = [
        "".join(map(chr, block.input_ids))
        for seed in (0, 1)
        for block in take(packer(source, 24, seed), 3)
    ]
    assert all(sorted(each) == texts for each in epochs)
    assert len(set(epochs)) == 6


SHARDS = st.lists(st.lists(st.text("ab ", max_size=5), max_size=12), min_size=1, max_size=4).filter(
    lambda shards: any(each.strip() for shard in shards for each in shard)
)


def numbered(shards) -> tuple[list[list[str]], list[str]]:
    """Shards whose documents are all different, and the documents."""
    letters = iter(map(chr, range(200, 2000)))
    own = [[next(letters) * len(each) if each.strip() else each for each in s] for s in shards]
    return own, [each for shard in own for each in shard if each.strip()]


@pytest.mark.parametrize("window", [1, 3, 1000])
@given(shards=SHARDS, streams=st.integers(1, 6))
@settings(max_examples=40)
def test_the_streams_have_every_row_of_every_shard_once_an_epoch(window, shards, streams):
    shards, texts = numbered(shards)
    parts = reading_order.parts_of(len(shards), streams)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_order, "WINDOW", window)
        source = Streamed(shards)
        epochs = reading_order.Epochs(len(shards) * parts, 0)
        found = collections.Counter()
        for stream in range(streams):
            reader = reading_order.ShardReader(source, epochs, stream, streams)
            assert reader.epoch == 0  # however many streams there are
            while (document := reader.read(), reader.epoch)[1] == 0:
                found[document] += bool(document.strip())
                reader.advance()
    assert +found == collections.Counter(texts)


def test_streams_that_share_a_shard_have_equal_parts_of_it(monkeypatch):
    monkeypatch.setattr(reading_order, "WINDOW", 1)
    source = Streamed([[chr(200 + i) for i in range(42)]])
    epochs = reading_order.Epochs(reading_order.parts_of(1, 4), 0)
    for stream in range(4):
        reader = reading_order.ShardReader(source, epochs, stream, 4)
        rows = 0
        while (reader.read(), reader.epoch)[1] == 0:
            rows, _ = rows + 1, reader.advance()
        assert rows in (10, 11)


def test_every_window_of_a_shard_has_an_order_of_its_own(monkeypatch):
    monkeypatch.setattr(reading_order, "WINDOW", 8)
    of = packer(Streamed([[chr(97 + i % 8) for i in range(32)]]), 8)
    orders = [bytes(block.input_ids) for block in take(of, 4)]
    assert {bytes(sorted(each)) for each in orders} == {b"abcdefgh"}
    assert len(set(orders)) == 4


@pytest.mark.parametrize("kind", ["documents", "shards", "mixture"])
@pytest.mark.parametrize("window", [1, 3, 1000])
@given(shards=SHARDS, streams=st.integers(1, 6), done=st.integers(0, 20))
@settings(max_examples=40)
def test_a_corpus_resumes_at_any_block(kind, window, shards, streams, done):
    own, _ = numbered(shards)
    texts, streamed = [each for shard in own for each in shard], Streamed(own)
    sources = {
        "documents": Sources(texts), "shards": Sources(streamed),
        "mixture": Sources(texts, streamed, weights=[0.7, 0.3]),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_order, "WINDOW", window)
        going, resumed = (packer(sources[kind], 4, 0, streams) for _ in range(2))
        for stream in range(streams):
            take(going, done + stream, stream)
        resumed.load_state(json.loads(json.dumps(going.state())))
        for stream in range(streams):
            assert take(resumed, 6, stream) == take(going, 6, stream)


WEIGHTS = st.lists(st.floats(0.01, 10) | st.integers(1, 100), min_size=2, max_size=6)


@given(WEIGHTS, st.integers(0, 7))
def test_a_mixture_keeps_its_weights_within_a_block(weights, stream):
    sources = [[chr(97 + i) * 5] for i in range(len(weights))]
    of = packer(Sources(*sources, weights=weights), 3, 0, stream + 1, mine=[stream])
    shares = [weight / sum(weights) for weight in weights]
    given_blocks = [0] * len(weights)
    for turn in range(1, 150):
        (token,) = set(of.next_block(stream).input_ids)
        given_blocks[token - 97] += 1
        # Stream 0 begins with the schedule; another has the difference of two of its places.
        bound = 1 if stream == 0 else 2
        for blocks, share in zip(given_blocks, shares, strict=True):
            assert abs(blocks - share * turn) < bound + 1e-6


def test_the_streams_of_a_mixture_do_not_all_have_the_same_source():
    of = packer(Sources(["a" * 9], ["b" * 9], weights=[1, 1]), 3, 0, 4)
    for _ in range(5):
        step = [of.next_block(stream).input_ids[0] for stream in range(4)]
        assert step.count(97) == step.count(98) == 2
    of = packer(Sources(["a" * 9], ["b" * 9], weights=[1, 1]), 3, 0, 2)
    assert {block.input_ids[0] for block in take(of, 2, 1)} == {97, 98}


DOCUMENTS = ["Emma\nWoodhouse", "hand\u2028some", 'clever, "and" rich', "ä" * 40, "  with a "]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        yield folder


def write_lines(file: Path, rows: list) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return file


def write_table(file: Path, texts: list, column: str = "text") -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"number": range(len(texts)), column: texts}), file, row_group_size=7)
    return file


def read(found: corpus.Corpus) -> list[str]:
    return [each for part in found.parts for each in part.texts()]


@pytest.fixture(scope="module")
def forms(tmp_path_factory) -> dict[str, dict]:
    """One corpus in every form that can hold it, blank documents among it."""
    import datasets

    folder = tmp_path_factory.mktemp("forms")
    names = ("lines", "tables", "saved", "splits", "texts")
    sub = {name: folder / name for name in names}
    for name in names:
        sub[name].mkdir()
    padded = [DOCUMENTS[0], "", *DOCUMENTS[1:], " \n"]
    rows = [{"text": each, "n": i} for i, each in enumerate(padded)]
    lines = write_lines(sub["lines"] / "a.jsonl", rows)
    table = write_table(sub["tables"] / "a.parquet", [*padded, None])
    for i, each in enumerate(padded):
        (sub["texts"] / f"{i}.txt").write_text(each, "utf-8")
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(sub["saved"])
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(sub["splits"])
    return {
        "lines": {"path": str(lines)},
        "folder_of_lines": {"path": str(sub["lines"])},
        "table": {"path": str(table)},
        "folder_of_tables": {"path": [str(sub["tables"])]},
        "texts": {"path": str(sub["texts"])},
        "dataset_of_lines": {"dataset": str(sub["lines"])},
        "dataset_of_tables": {"dataset": str(sub["tables"])},
        "saved": {"dataset": str(sub["saved"])},
        "saved_splits": {"dataset": str(sub["splits"])},
        "streamed_lines": {"path": str(lines), "streaming": True},
        "streamed_tables": {"path": str(table), "streaming": True},
        "streamed_dataset": {"dataset": str(sub["tables"]), "streaming": True},
    }


FORMS = (
    "lines", "folder_of_lines", "table", "folder_of_tables", "texts", "dataset_of_lines",
    "dataset_of_tables", "saved", "saved_splits", "streamed_lines", "streamed_tables",
    "streamed_dataset",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_corpus_reads_the_same(forms, form, tmp_path_factory):
    assert set(forms) == set(FORMS)
    found = opened(**forms[form])
    assert read(found) == DOCUMENTS
    assert str(tmp_path_factory.getbasetemp()) not in found.describe()
    if not forms[form].get("streaming"):
        assert found.fingerprint == opened(**forms["lines"]).fingerprint
        assert "5 documents" in found.describe()
        assert list(found.sources[0]) == DOCUMENTS
    else:
        assert "streaming, 1 shards" in found.describe()
    same = packer(found, 16), packer(opened(**forms[form]), 16)
    assert take(same[0], 20) == take(same[1], 20)


def test_a_file_that_has_changed_is_read_again(tmp_path):
    file = tmp_path / "a.csv"
    for word in ("one", "three"):
        file.write_text(f"body\n{word}\n\n")
        assert read(opened(path=str(file), field="body")) == [word]
    assert len(opened(path=str(file), field="body").sources[0].rows.cache_files) == 1
    for content, words in (
        ("body\n\n", "no text in .*a.csv"),
        ('body\na\n"b', "line 3 is not CSV"),
    ):
        file.write_text(content)
        with pytest.raises(BadInput, match=rf"^data\.path: .*{words}"):
            opened(path=str(file), field="body")


BAD = '{"text": "half \\ud83d"}\n'


def bad_corpora(folder: Path) -> dict[str, tuple[dict, str]]:
    """Keys of corpora whose last document is no text, and where an error says that it is."""
    import datasets
    import pyarrow as pa

    (folder / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n' + BAD)
    bad = pa.array([b"a", b"b", b"half \xff"]).view(pa.string())
    table = {"path": str(write_table(folder / "1.parquet", bad))}
    datasets.Dataset(pa.table({"text": bad})).save_to_disk(folder / "set")
    lines = {"path": f"{folder}/a.jsonl"}
    return {
        "lines": (lines, "a.jsonl line 3 has half a surrogate pair"),
        "streamed lines": ({**lines, "streaming": True}, "a.jsonl line 3 has half a surrogate"),
        "table": (table, "1.parquet row 3 is not UTF-8 text"),
        "saved": ({"dataset": f"{folder}/set"}, "set row 3 is not UTF-8 text"),
    }


@pytest.mark.parametrize("kind", ["lines", "streamed lines", "table", "saved"])
@pytest.mark.parametrize("known_at_the_start", [True, False])
def test_bad_text_is_refused_with_its_place_or_replaced(
    tmp_path, kind, known_at_the_start, monkeypatch
):
    keys, words = bad_corpora(tmp_path)[kind]
    if not known_at_the_start:  # so large a corpus is not read whole before the run
        monkeypatch.setattr(arrow_rows, "ALL_READ", 0)
        monkeypatch.setattr(corpus.Documents, "fingerprint", lambda source: "")

    def blocks(**more):
        take(packer(opened(**keys, **more), 8), 9)

    key = "data.dataset" if "dataset" in keys else "data.path"
    with pytest.raises(BadInput) as error:
        blocks()
    said = str(error.value)
    assert said.startswith(f"{key}: ") and words in said and "\n" not in said
    assert said.endswith("; data.bad_text=replace reads it as U+FFFD")
    with pytest.raises(BadInput, match=r"; data\.mixture\[0\]\.bad_text=replace reads"):
        take(packer(opened(mixture=[{**keys, "weight": 1}]), 8), 9)
    blocks(bad_text="replace")
    found = opened(**keys, bad_text="replace")
    assert read(found)[-1] == "half \ufffd"
    # What it does not change keeps its fingerprint.
    assert opened(bad_text="replace").fingerprint == opened().fingerprint
    mixed = opened(mixture=[{**keys, "bad_text": "replace", "weight": 1}])
    assert read(mixed) == read(found) and mixed.fingerprint == found.fingerprint


def test_null_is_a_blank_document_of_a_stream(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"text": None}, {"text": "b"}])
    found = opened(path=str(file), streaming=True)
    assert list(found.sources[0].windows(0, 0, 2)) == [["a", ""], ["b"]]
    assert read(found) == ["a", "b"]


def test_held_out_text_is_read_like_any_other(tmp_path):
    rows = write_lines(tmp_path / "rows.jsonl", [{"text": "one"}, {"text": ""}, {"text": "two"}])
    (tmp_path / "text.txt").write_bytes(b"a\r\nb")
    found = held_out.read_texts([str(rows), str(tmp_path / "text.txt"), "builtin"])
    assert found == {"rows": "one\n\ntwo", "text": "a\nb", "builtin": text.held_out()}
    (tmp_path / "rows.md").write_text("a")
    (tmp_path / "a.ndjson").write_text(BAD)
    for given_paths, words in (
        ([str(rows), str(tmp_path / "rows.md")], "expected files of different names, got two rows"),
        (str(tmp_path / "absent.txt"), "no such file: .*absent"),
        (str(tmp_path / "a.ndjson"), "line 1 has half a surrog"),
    ):
        with pytest.raises(BadInput, match=rf"^evaluate\.path: .*{words}"):
            held_out.read_texts(given_paths)


def test_files_are_read_in_their_order_whatever_they_are(tmp_path):
    one = write_lines(tmp_path / "1.jsonl", [{"text": "1a"}, {"text": "1b"}])
    two = write_table(tmp_path / "2.parquet", ["2a", "2b"])
    three = tmp_path / "3.md"
    three.write_bytes(b"3\r\nmore")
    last = write_lines(tmp_path / "4.jsonl", [{"text": "4a"}])
    names = [str(each) for each in (three, two, one, last)]
    assert read(opened(path=names)) == ["3\nmore", "2a", "2b", "1a", "1b", "4a"]
    assert read(opened(path=str(tmp_path))) == ["1a", "1b", "2a", "2b", "4a"]


def test_the_built_in_text_is_read_where_nothing_is_given():
    chapters = text.chapters(text.train())
    assert read(opened()) == read(opened(path="builtin")) == chapters


def test_the_built_in_text_is_read_without_datasets(tmp_path, monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] in ("datasets", "pyarrow")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert len(read(opened())) == len(text.chapters(text.train()))
    file = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    for streaming in (False, True):
        with pytest.raises(BadInput, match=r"data.path: reading it needs the package datasets"):
            opened(path=str(file), streaming=streaming)


def test_beyond_a_million_documents_blank_ones_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_rows, "ALL_READ", 3)
    texts = ["aa", " ", "b", "", "c"]
    write_lines(tmp_path / "a.jsonl", [{"text": each} for each in texts])
    write_table(tmp_path / "b.parquet", texts)
    for name in ("a.jsonl", "b.parquet"):
        found = opened(path=str(tmp_path / name))
        assert len(found.sources[0]) == 5
        assert read(found) == ["aa", "b", "c"]
        epoch = take(packer(found, 4), 1)[0]
        assert sorted(epoch.input_ids) == codes("aabc")


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Four Parquet files of 5 to 29 rows, in groups of 7, every document another letter."""
    folder = tmp_path_factory.mktemp("shards")
    letters = iter(map(chr, range(200, 2000)))
    for number, rows in enumerate((29, 5, 14, 8)):
        texts = [next(letters) * (1 + i % 9) for i in range(rows)]
        write_table(folder / f"{number}.parquet", texts)
    return folder


@pytest.mark.parametrize("form", ["path", "dataset"])
@pytest.mark.parametrize("streams", [1, 3, 9])
@pytest.mark.parametrize("window", [2, 10])
def test_streamed_parquet_has_every_document_once_and_resumes(
    shards, form, streams, window, monkeypatch
):
    monkeypatch.setattr(reading_order, "WINDOW", window)

    def new(seed=0):
        return packer(opened(**{form: str(shards)}, streaming=True), 6, seed, streams)

    going = new()
    states, blocks = [], []
    for _ in range(60 // streams):
        states.append(json.loads(json.dumps(going.state())))
        blocks.append([going.next_block(stream) for stream in range(streams)])
    if streams == 1:
        tokens = [token for step in blocks for block in step for token in block.input_ids]
        epoch = sorted(codes("".join(read(opened(path=str(shards))))))
        assert sorted(tokens[: len(epoch)]) == epoch
    for step in range(0, len(states), 3):
        resumed = new()
        resumed.load_state(states[step])
        for following in blocks[step : step + 3]:
            assert [resumed.next_block(stream) for stream in range(streams)] == following
    assert [new(1).next_block(stream) for stream in range(streams)] != blocks[0]


@pytest.mark.parametrize("rows", [1, 3, 7, 11, 100])
def test_windows_of_a_shard_are_its_rows_in_order(shards, rows):
    """However `datasets` groups the rows in its batches."""
    source = opened(path=str(shards), streaming=True).sources[0]
    whole = opened(path=str(shards)).sources[0]
    assert source.shards == 4
    texts = []
    for shard, length in enumerate((29, 5, 14, 8)):
        windows = list(source.windows(shard, 0, rows))
        assert all(len(window) == rows for window in windows[:-1])
        assert sum(map(len, windows)) == length
        for first in range(0, length, rows):
            assert list(source.windows(shard, first, rows)) == windows[first // rows :]
        texts += [each for window in windows for each in window]
    assert texts == list(whole)


def test_a_shard_that_breaks_on_the_way_is_named(tmp_path):
    first = [{"text": str(i)} for i in range(corpus.SAMPLED_STREAM)]
    write_lines(tmp_path / "0.jsonl", first)
    (tmp_path / "1.jsonl").write_text('{"text": "b"}\n{"text"\n')
    source = opened(path=str(tmp_path), streaming=True).sources[0]
    with pytest.raises(BadInput, match=r"^data\.path: .*1\.jsonl line 2 is not JSON: "):
        list(source.windows(1, 0, 10))


@pytest.fixture(scope="module")
def bad(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    write_lines(folder / "good.jsonl", [{"text": "Emma"}])
    (folder / "empty.txt").write_text(" \n")
    (folder / "empty.jsonl").write_text("")
    (folder / "no_text").mkdir()
    (folder / "broken.jsonl").write_text('{"text": "a"}\n\n{"text": }\n')
    write_table(folder / "empty.parquet", [" ", None])
    write_table(folder / "good.parquet", ["a"])
    for name in ("set_broken", "set_texts", "set"):
        (folder / name).mkdir()
    shutil.copy(folder / "broken.jsonl", folder / "set_broken" / "train.jsonl")
    (folder / "set_texts" / "a.txt").write_text("a")
    write_table(folder / "set" / "train.parquet", ["a"])
    return folder


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"path": "{}/absent.txt"}, "data.path: no such file: {}/absent.txt"),
        ({"path": "{}/empty.txt"}, "data.path: no text in {}/empty.txt"),
        ({"path": "{}/empty.jsonl"}, "data.path: no text in {}/empty.jsonl"),
        ({"path": "{}/empty.parquet"}, "data.path: no text in {}/empty.parquet"),
        ({"path": "{}/no_text"}, "data.path: no text in {}/no_text"),
        ({"path": []}, "data.path: no text in an empty list"),
        ({"path": "{}/broken.jsonl"}, "data.path: {}/broken.jsonl line 3 is not JSON: Expecting"),
        ({"path": "{}/good.jsonl", "field": "body"}, "line 1 has no key 'body' (data.field)"),
        ({"path": "{}/good.parquet", "field": "number"},
         "good.parquet: 'number' is not text but int64"),
        ({"path": "{}/good.jsonl", "bad_text": "drop"},
         "data.bad_text: expected one of refuse, replace, got 'drop'"),
        ({"mixture": [{"path": "{}/good.jsonl", "weight": 1, "bad_text": "keep"}]},
         "data.mixture[0].bad_text: expected one of refuse, replace, got 'keep'"),
        ({"path": "{}/good.jsonl", "subset": "en"},
         "data.subset: expected it with dataset only, got 'en'"),
        ({"path": "{}/good.jsonl", "split": "test"}, "data.split: expected it with dataset"),
        ({"path": "{}/good.jsonl", "revision": "1"},
         "data.revision: expected it with dataset"),
        ({"path": "{}/no_text", "streaming": True}, "data.path: no text in {}/no_text"),
        ({"path": "{}/broken.jsonl", "streaming": True},
         "data.path: {}/broken.jsonl line 3 is not JSON"),
        ({"path": "{}/empty.parquet", "streaming": True}, "data.path: no text in"),
        ({"streaming": True}, "data.streaming: expected false for the built-in text"),
        ({"path": "{}/good.jsonl", "dataset": "x"},
         "data.path and dataset: expected one source, got path and dataset"),
        ({"dataset": "{}/absent"}, "data.dataset: no such folder: {}/absent"),
        ({"dataset": "./absent"}, "data.dataset: no such folder: ./absent"),
        ({"dataset": "{}/good.jsonl"}, "a file is given as data.path"),
        ({"dataset": "{}/no_text"}, "data.dataset: cannot read {}/no_text"),
        ({"dataset": "{}/set_texts"}, "got .txt files; a folder of texts is given as data.path"),
        ({"dataset": "{}/set", "revision": "1"}, "data.revision: expected null for the folder"),
        ({"dataset": "{}/set", "split": "test"}, "data.dataset: cannot read {}/set: Unknown split"),
        ({"dataset": "{}/set", "split": "test", "streaming": True}, "Bad split: test"),
        ({"dataset": "{}/set", "subset": "en"}, "'en' not found"),
        ({"dataset": "{}/set", "field": "body"},
         "no field 'body' (data.field); its fields are number, text"),
        ({"dataset": "{}/set", "field": "body", "streaming": True}, "no field 'body' (data.field)"),
        ({"dataset": "{}/set", "field": "number"}, "data.dataset: 'number' is not text but int64"),
        ({"dataset": "{}/set_broken"}, "train.jsonl line 3 is not JSON"),
        ({"dataset": "{}/set_broken", "streaming": True}, "train.jsonl line 3 is not JSON"),
        ({"mixture": []}, "data.mixture: expected a list with something in it, got []"),
        ({"mixture": {"path": "x"}}, "data.mixture: expected a list of keys and values"),
        ({"mixture": ["x"]}, "data.mixture[0]: expected keys and values, got 'x'"),
        ({"mixture": [{"path": "builtin", "weight": 1}, {"pth": "x", "weight": 1}]},
         "data.mixture[1]: unknown key 'pth'; the nearest known key is 'path'"),
        ({"mixture": [{"weight": 1}]},
         "data.mixture[0]: expected a path or a dataset, got neither"),
        ({"mixture": [{"path": "builtin"}]},
         "data.mixture[0].weight: expected float, got None"),
        ({"mixture": [{"path": "builtin", "weight": 0}]}, "expected a positive number, got 0"),
        ({"mixture": [{"path": "builtin", "weight": True}]}, "weight: expected float, got True"),
        ({"mixture": [{"path": "builtin", "weight": "a"}]}, "weight: expected float, got 'a'"),
        ({"mixture": [{"path": "builtin", "weight": float("nan")}]}, "a finite number, got nan"),
        ({"mixture": [{"path": {}, "weight": 1}]},
         "data.mixture[0].path: expected str or a list of str or null, got {"),
        ({"mixture": [{"path": [3], "weight": 1}]}, "data.mixture[0].path: expected"),
        ({"mixture": [{"dataset": ["a"], "weight": 1}]},
         "data.mixture[0].dataset: expected str or null"),
        ({"mixture": [{"path": "x", "streaming": "yes", "weight": 1}]},
         "data.mixture[0].streaming: expected bool, got 'yes'"),
        ({"mixture": [{"path": "{}/broken.jsonl", "weight": 1}]},
         "data.mixture[0].path: {}/broken.jsonl line 3 is not JSON"),
        ({"mixture": [{"path": "{}/good.jsonl", "weight": 1, "field": "body"}]},
         "(data.mixture[0].field)"),
        ({"mixture": [{"path": "builtin", "weight": 1}], "path": "x"},
         "data.path: expected it in the sources of mixture, got both"),
        ({"mixture": [{"path": "builtin", "weight": 1}], "field": "body"},
         "data.field: expected it in"),
    ],
)  # fmt: skip
def test_bad_input_is_named(bad, keys, words):
    def filled(value):
        if isinstance(value, list):
            return [filled(each) for each in value]
        if isinstance(value, dict):
            return {key: filled(each) for key, each in value.items()}
        return value.replace("{}", str(bad)) if isinstance(value, str) else value

    with pytest.raises(BadInput) as error:
        opened(**filled(keys))
    assert filled(words) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_that_the_hub_does_not_have_is_named():
    with pytest.raises(BadInput, match=r"^data\.dataset: cannot read nobody/nothing: \w+"):
        opened(dataset="nobody/nothing")


def test_a_split_that_was_not_saved_is_named(forms):
    with pytest.raises(BadInput, match=r"data\.split: .* has no split 'dev'; .* test, train"):
        opened(**forms["saved_splits"], split="dev")
    with pytest.raises(BadInput, match=r"data\.streaming: expected false"):
        opened(**forms["saved"], streaming=True)
    with pytest.raises(BadInput, match=r"data\.subset: .* got 'en'"):
        opened(**forms["saved"], subset="en")
    assert read(opened(**forms["saved_splits"], split="test")) == DOCUMENTS[:1]


def test_a_source_that_fills_no_block_is_refused(tmp_path):
    encode = corpus.encoder(tiny_models.byte_tokenizer(), append_eos=True)
    file = write_lines(tmp_path / "a.jsonl", [{"text": "Emma"}, {"text": "Jane"}])
    found = opened(path=str(file))
    corpus.check_length(found, encode, 10)
    with pytest.raises(BadInput, match=r"data\.path: the corpus has 10 tokens, expected at least"):
        corpus.check_length(found, encode, 11)
    with pytest.raises(BadInput, match="the corpus has 8 tokens"):
        corpus.check_length(found, corpus.encoder(tiny_models.byte_tokenizer(), False), 9)
    mixed = opened(mixture=[{"path": "builtin", "weight": 1}, {"path": str(file), "weight": 1}])
    with pytest.raises(BadInput, match=r"data\.mixture\[1\]\.path: the corpus has 10 tokens"):
        corpus.check_length(mixed, encode, 11)


def test_no_more_is_read_than_a_block_needs(shards):
    found = opened(path=str(shards))
    seen = []
    corpus.check_length(found, lambda document: seen.append(document) or codes(document), 3)
    assert len(seen) == 2


def test_a_fingerprint_is_of_the_text_alone(tmp_path):
    rows = [{"text": f"document {i}"} for i in range(30)]
    first = write_lines(tmp_path / "a.jsonl", rows)
    fingerprint = opened(path=str(first)).fingerprint
    listed = json.dumps([row["text"] for row in rows]).encode()
    assert fingerprint == hashlib.sha256(listed).hexdigest()
    (tmp_path / "deep").mkdir()
    moved = first.rename(tmp_path / "deep" / "b.jsonl")
    assert opened(path=str(moved)).fingerprint == fingerprint
    assert len(fingerprint) == 64 and int(fingerprint, 16)
    for changed in (rows[:-1], [*rows[:17], {"text": "other"}, *rows[18:]], rows[::-1]):
        assert opened(path=str(write_lines(moved, changed))).fingerprint != fingerprint


def test_a_fingerprint_of_a_large_source_has_its_length_and_a_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "SAMPLED", 5)
    rows = [{"text": f"document {i}"} for i in range(31)]
    file = tmp_path / "a.jsonl"
    whole = opened(path=str(write_lines(file, rows))).fingerprint

    def changed(index):
        other = [*rows[:index], {"text": "other"}, *rows[index + 1 :]]
        return opened(path=str(write_lines(file, other))).fingerprint

    # The first, the last, and those between at even distances.
    assert [i for i in range(31) if changed(i) != whole] == [0, 7, 15, 22, 30]
    same = [opened(path=str(write_lines(file, rows[:1] * n))).fingerprint for n in (31, 32)]
    assert same[0] != same[1]


def test_a_fingerprint_of_a_stream_is_not_of_its_place(shards, tmp_path):
    for form in ("path", "dataset"):
        copy = tmp_path / form
        shutil.copytree(shards, copy)
        found = [opened(**{form: str(f)}, streaming=True).fingerprint for f in (shards, copy)]
        assert found[0] == found[1]
        write_table(copy / "0.parquet", ["other"])
        assert opened(**{form: str(copy)}, streaming=True).fingerprint != found[0]


def test_a_mixture_has_its_sources_and_weights_in_its_fingerprint(forms):
    def mixture(*weights, forms=(forms["lines"], {"path": "builtin"})):
        return opened(
            mixture=[{**form, "weight": w} for form, w in zip(forms, weights, strict=True)]
        )

    one = mixture(3, 1)
    assert one.fingerprint == mixture(3.0, "1e0").fingerprint
    assert one.fingerprint != mixture(2, 1).fingerprint
    assert one.fingerprint != mixture(3, 1, forms=(forms["saved"], forms["lines"])).fingerprint
    table = mixture(3, 1, forms=(forms["table"], {"path": "builtin"}))
    assert one.fingerprint == table.fingerprint
    assert one.describe() == (
        "a.jsonl: 5 documents, weight 0.75\nthe built-in text: 24 documents, weight 0.25"
    )
    encode = corpus.encoder(tiny_models.byte_tokenizer(), append_eos=True)
    of = packing.Packer(one, encode, 32, 0)
    assert len(take(of, 8)) == 8 and of.state()["0"]["given"] == [6, 2]
