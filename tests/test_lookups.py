"""Blocks that ask for what stands far back: exact in length, answerable, not the evaluation's."""

import itertools
import json
import random
import re

import pytest
import tiny_models
import torch

from hf_sigmoid import text
from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals import tasks
from hf_sigmoid.evals.templates import Fact, Template, parse
from hf_sigmoid.training import lookups, run_keys
from hf_sigmoid.training.corpus import encoder, open_corpus
from hf_sigmoid.training.lookups import FORMS, LookupBlocks, draw
from hf_sigmoid.training.packing import IGNORED, Packer

BLOCK = 1024
WEIGHT = 7.0


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_models.byte_tokenizer()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    documents = text.chapters(text.train())[:8]
    file.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    return open_corpus(run_keys.Data(path=str(file)))


def packer(corpus, tokenizer, share=0.5, seed=0, **options):
    def others(reader, seed):
        return LookupBlocks(reader, tokenizer, BLOCK, weight=WEIGHT, seed=seed)

    encode = encoder(tokenizer, True)
    return Packer(corpus, encode, BLOCK, seed, share=share, others=others, **options)


def asking(corpus, tokenizer, count, **options):
    """The first blocks that ask for something."""
    reader = packer(corpus, tokenizer, **options)
    found = (reader.next_block(0) for _ in range(1000))
    return list(itertools.islice((b for b in found if max(b.weights) > 1), count))


def test_every_answer_stands_in_the_text_before_it_and_counts_more(corpus, tokenizer):
    for block in asking(corpus, tokenizer, 20):
        assert len(block.input_ids) == len(block.labels) == len(block.weights) == BLOCK
        assert block.position_ids == list(range(BLOCK))
        assert block.labels == [*block.input_ids[1:], IGNORED] and block.weights[-1] == 1
        answers, current = [], []
        for place, weight in enumerate(block.weights):
            assert weight in (1.0, WEIGHT)
            if weight == WEIGHT:
                current.append(place)
            elif current:
                answers.append(current)
                current = []
        answers += [current] if current else []
        assert len(answers) >= 2
        whole = tokenizer.decode(block.input_ids)
        for places in answers:
            answer = tokenizer.decode([block.labels[i] for i in places]).strip()
            before = tokenizer.decode(block.input_ids[: places[0] + 1])
            assert answer in before, (answer, whole)


def test_a_question_has_one_answer():
    """Of the facts of a block only one has the key, and it has the value."""
    rng = random.Random(0)
    for _ in range(200):
        facts, asked = draw(rng, 9)
        assert len({*facts}) == 9 and 5 <= len(asked) <= 9
        for question, answer in asked:
            fits = [fact for fact in facts if re.search(rf"{re.escape(answer.strip())}\b", fact)]
            assert len(fits) == 1
            key = next(k for k in re.findall(r"[A-Z]\w+ [A-Z]\w+", question) if k in fits[0])
            assert [fact for fact in facts if key in fact] == fits


def test_keys_that_share_a_word_are_among_them():
    facts, _ = draw(random.Random(0), 9)
    first = [re.findall(r"([A-Z]\w+) [A-Z]\w+", fact)[-1] for fact in facts]
    assert len({*first}) == 6


def test_the_share_is_kept_and_both_kinds_resume(corpus, tokenizer):
    reader = packer(corpus, tokenizer, share=0.25)
    blocks = [reader.next_block(0) for _ in range(12)]
    assert sum(max(block.weights) > 1 for block in blocks) == 3
    state = json.loads(json.dumps(reader.state()))
    expected = [reader.next_block(0) for _ in range(8)]
    again = packer(corpus, tokenizer, share=0.25)
    again.load_state(state)
    assert [again.next_block(0) for _ in range(8)] == expected
    other = packer(corpus, tokenizer, share=0.25, seed=1)
    assert [other.next_block(0) for _ in range(12)] != blocks


def test_streams_read_the_same_blocks_on_any_number_of_processes(corpus, tokenizer):
    together = packer(corpus, tokenizer, streams=2, mine=(0, 1))
    for stream in (0, 1):
        alone = packer(corpus, tokenizer, streams=2, mine=(stream,))
        for _ in range(4):
            assert alone.next_block(stream) == together.next_block(stream)


def test_no_sentence_is_one_of_the_evaluation():
    """No four words in a row of a fact or a question are in any task's sentences."""

    def runs(sentence):
        words = re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}", "", sentence).lower())
        return {tuple(words[i : i + 4]) for i in range(len(words) - 3)}

    rng, theirs = random.Random(0), set()
    for spec in ("single", "single:uuid", "multikey:3", "multivalue:4", "multiquery:4", "passkey",
                 "vt:2x3", "nolap:3", "babi:3"):  # fmt: skip
        made = tasks.template(parse(spec), rng, "")
        assert isinstance(made, Template) and all(isinstance(f, Fact) for f in made.facts)
        for sentence in (made.question, made.prefix, *(fact.text for fact in made.facts)):
            theirs |= runs(sentence)
    ours = set().union(*(runs(part) for form in FORMS for part in form), runs(lookups.AGAIN))
    assert theirs and not ours & theirs


def test_a_block_without_room_and_a_text_without_sentences_are_refused(tokenizer):
    class Reader:
        def read(self):
            return "words without an end " * 400

        def advance(self):
            pass

    with pytest.raises(BadInput, match="block_size of twice that, got 64"):
        LookupBlocks(Reader(), tokenizer, 64, weight=1.0, seed="a").next_block()
    made = LookupBlocks(Reader(), tokenizer, BLOCK, weight=1.0, seed="a")
    lookups_read = lookups.MOST_DOCUMENTS
    try:
        lookups.MOST_DOCUMENTS = 3
        with pytest.raises(BadInput, match="3 documents have no place to hide facts in"):
            made.next_block()
    finally:
        lookups.MOST_DOCUMENTS = lookups_read


def test_weights_reach_the_batch(corpus, tokenizer):
    from hf_sigmoid.training.packing import step_batches

    (batch,) = step_batches(packer(corpus, tokenizer), 2, 1)
    assert batch["weights"].shape == (2, BLOCK) and batch["weights"].dtype == torch.float32
    assert batch["weights"].max() == WEIGHT
