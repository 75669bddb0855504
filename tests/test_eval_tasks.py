"""Prompts of every evaluation task, on three kinds of tokenizer, and solved from their text."""

import hashlib
import json
import os
import random
import re
import string
import subprocess
import sys
from collections import Counter
from functools import cache

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from hf_sigmoid import text
from hf_sigmoid.evals import KINDS, RULER, PromptBuilder, Sample, Spec, parse, words
from hf_sigmoid.evals.haystack import Haystack
from hf_sigmoid.evals.tasks import STORY_HEAD
from hf_sigmoid.evals.templates import Template
from hf_sigmoid.evals.words import RIDDLES

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<user>{{ m['content'] | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKENIZERS = ("byte-level BPE", "SentencePiece-like", "WordPiece-like")
SPECIAL = ["<unk>", "<s>", "</s>", "<user>", "<assistant>"]


def corpus() -> list[str]:
    """Prose, and every printable sign in every place of a word."""
    rng = random.Random(0)
    signs = ["".join(rng.choices(string.printable[:94], k=12)) for _ in range(2000)]
    return [*text.train()[:120_000].split("\n"), *signs]


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A small tokenizer of each kind, with the special tokens that its kind puts around a text."""
    if kind == "byte-level BPE":
        made = Tokenizer(token_models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    elif kind == "SentencePiece-like":
        made = Tokenizer(token_models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        made.decoder = decoders.Metaspace(prepend_scheme="always")
        trainer = trainers.UnigramTrainer(
            vocab_size=900,
            special_tokens=SPECIAL,
            unk_token="<unk>",
            initial_alphabet=[*string.printable[:94], "\n"],
            show_progress=False,
        )
    else:
        made = Tokenizer(token_models.WordPiece(unk_token="<unk>"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=900, special_tokens=SPECIAL, show_progress=False
        )
    made.train_from_iterator(corpus(), trainer)
    if kind != "byte-level BPE":
        ends = {"SentencePiece-like": "<s> $A", "WordPiece-like": "<s> $A </s>"}
        made.post_processor = processors.TemplateProcessing(
            single=ends[kind], special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


@cache
def builder(kind: str, prompt: str = "base") -> PromptBuilder:
    return PromptBuilder(tokenizer(kind), text.held_out(), prompt=prompt)


def decoded(kind: str, ids: list[int]) -> str:
    return tokenizer(kind).decode(ids, clean_up_tokenization_spaces=False)


SPECS = [
    "single", "single:uuid", "multikey:2", "multikey:4", "multikey:8", "multikey:16",
    "multivalue:2", "multivalue:4", "multiquery:2", "multiquery:4", "vt:1x4", "vt:3x2", "vt:1x1",
    "passkey", "nolap:0", "nolap:3", "babi:2", "babi:3", "cwe:3x8x2", "cwe:1x9x1", "fwe", "fwe:1.5",
]  # fmt: skip
DEPTHS = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1))


@st.composite
def samples(
    draw, specs=tuple(SPECS), prompts=("base", "chat")
) -> tuple[str, PromptBuilder, Sample]:
    """A tokenizer's kind, a builder, and a sample of any task, length, depth, seed and index."""
    kind = draw(st.sampled_from(TOKENIZERS))
    spec = parse(draw(st.sampled_from(specs)))
    made = builder(kind, draw(st.sampled_from(prompts)))
    sample = made.build(
        spec,
        length=draw(st.integers(1300, 5000)),
        depth=draw(DEPTHS) if spec.has_depth else None,
        seed=draw(st.integers(0, 2**40)),
        index=draw(st.integers(0, 10**6)),
    )
    return kind, made, sample


WITH_DEPTH = tuple(spec for spec in SPECS if parse(spec).has_depth)
LISTS = tuple(spec for spec in SPECS if not parse(spec).has_depth)
examples = settings(max_examples=120)


# What a prompt is made of.


@examples
@given(samples())
def test_a_prompt_has_exactly_the_length_asked_and_ends_where_the_answer_begins(made):
    kind, _, sample = made
    assert len(sample.prompt) == sample.length
    assert min(sample.prompt) >= 0 and max(sample.prompt) < len(tokenizer(kind))
    tail = loose(decoded(kind, sample.prompt[-300:]))
    lead = sample.answer_prefix.lower()
    assert tail.endswith(lead)
    assert loose(sample.question) in tail
    assert sample.positions >= sample.length + len(sample.answer)


@examples
@given(samples(specs=WITH_DEPTH))
def test_without_its_needles_a_prompt_is_a_window_between_fixed_parts(made):
    kind, made_by, sample = made
    head, tail = fixed_parts(kind, sample)
    without, last = [], 0
    for needle in sample.needles:
        assert last <= needle.start < needle.stop <= sample.length
        without += sample.prompt[last : needle.start]
        last = needle.stop
    without += sample.prompt[last:]
    assert without[: len(head)] == head and without[len(without) - len(tail) :] == tail
    window = without[len(head) : len(without) - len(tail)]
    assert window
    in_noise = sample.task.startswith(("vt", "passkey"))
    if not in_noise:
        assert contains(made_by.haystack.ids, window)
    else:
        assert len(set(window)) < 60 and "lamp" in decoded(kind, window + window[:200])
    # Depth is the share of the window before each needle, and exact to a token of one of them.
    before = len(head)
    for needle in sample.needles:
        assert needle.depth == pytest.approx((needle.start - before) / len(window), abs=1e-12)
        assert 0 <= needle.depth <= 1
        before += needle.stop - needle.start
    if sample.depth is not None:
        assert abs(sample.realised_depth - sample.depth) <= 0.5 / len(window) + 1e-12


@examples
@given(samples(specs=[spec for spec in WITH_DEPTH if spec[:2] not in ("vt", "pa")]))
def test_windows_cut_no_word_and_none_of_their_text_is_lost(made):
    kind, made_by, sample = made
    head, tail = fixed_parts(kind, sample)
    ids = sample.prompt[: sample.length - len(tail)]
    for needle in reversed(sample.needles):
        ids = ids[: needle.start] + ids[needle.stop :]
    window, haystack = ids[len(head) :], made_by.haystack.ids
    said, whole = (" ".join(decoded(kind, each).split()) for each in (window, haystack))
    assert f" {said} " in f" {whole} "


@examples
@given(samples(specs=WITH_DEPTH))
def test_needles_are_whole_sentences_between_sentences(made):
    kind, _, sample = made
    for needle in sample.needles:
        ids = sample.prompt[needle.start : needle.stop]
        assert loose(decoded(kind, ids)) == loose(needle.text)
        before = decoded(kind, sample.prompt[: needle.start]).rstrip(" \"')")
        assert before[-1] in ".!?:", before[-80:]
        after = decoded(kind, sample.prompt[needle.stop :]).lstrip(" \"'(")
        if kind != "WordPiece-like":  # lower case, so a beginning does not show
            assert after[0].isupper() or after[0] == "\n" or after.startswith("</s>"), after[:80]


@examples
@given(samples())
def test_answers_and_decoys_are_told_apart_by_their_ids(made):
    kind, made_by, sample = made
    assert loose(decoded(kind, sample.answer)) == loose(listed(sample.answer_texts))
    assert 1 <= len(sample.decoys) == len(sample.decoy_texts) <= made_by.decoys
    everything = [sample.answer, *sample.decoys]
    for i, one in enumerate(everything):
        assert all(other[: len(one)] != one for other in everything[:i] + everything[i + 1 :])
    for ids, said in zip(sample.decoys, sample.decoy_texts, strict=True):
        assert loose(decoded(kind, ids)) == loose(listed(said))
        assert len(said) == len(sample.answer_texts) and said != sample.answer_texts
    assert json.loads(json.dumps(sample.record()))["answer"] == list(sample.answer_texts)


@examples
@given(samples(specs=LISTS))
def test_lists_fill_their_room_with_whole_words(made):
    kind, _, sample = made
    assert sample.realised_depth is None and sample.pivot is None
    for needle in sample.needles:
        assert loose(decoded(kind, sample.prompt[needle.start : needle.stop])) == needle.text[1:]
        assert needle.text[1:] in sample.answer_texts
    starts = [needle.start for needle in sample.needles]
    assert starts == sorted(set(starts))
    words = re.findall("[a-z]+", list_of(kind, sample))
    assert len(sample.needles) == sum(word in sample.answer_texts for word in words)
    assert {len(word) for word in words} == {6}  # none cut


# What the prompts say.


@examples
@given(samples())
def test_the_answer_follows_from_the_text(made):
    kind, _, sample = made
    prompt = loose(decoded(kind, sample.prompt))
    assert solve(sample.task, prompt) == [part.lower() for part in sample.answer_texts]


@examples
@given(samples(specs=[spec for spec in WITH_DEPTH if spec != "nolap:0"]))
def test_without_a_supporting_needle_the_answer_does_not_follow(made):
    kind, _, sample = made
    start, stop = sample.support[0]
    prompt = loose(decoded(kind, sample.prompt[:start] + sample.prompt[stop:]))
    assert solve(sample.task, prompt) != [part.lower() for part in sample.answer_texts]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_settings_of_ruler_are_kept(kind):
    sample = builder(kind).build("cwe", length=6000)
    counts = Counter(re.findall("[a-z]+", list_of(kind, sample)))
    assert sample.task == "cwe:10x30x3" and Counter(counts.values())[30] == 10
    assert set(counts.values()) == {30, 3} and len(sample.needles) == 300
    sample = builder(kind).build("fwe", length=6000)
    counts = Counter(re.findall("[a-z]+", list_of(kind, sample)))
    first, second, third, fourth = (count for _, count in counts.most_common(4))
    # Ranks 2, 3, 4 and 5 of Zipf's law with α = 2, cut to whole numbers.
    for count, rank in ((second, 3), (third, 4), (fourth, 5)):
        assert count == pytest.approx(first * 4 / rank**2, abs=1.01)
    sample = builder(kind).build("vt", length=2000, depth=0.25)
    assert sample.task == "vt:1x4" and len(sample.answer_texts) == 5
    assert [needle.supports for needle in sample.needles] == [True] * 5
    assert sample.pivot == 0
    for index in range(6):
        sample = builder(kind).build("vt:3x2", length=2000, depth=0.5, index=index)
        supports = [needle.supports for needle in sample.needles]
        assert sum(supports) == 3 and supports.index(True) == sample.pivot
    for task, supports, all_needles in (
        ("multikey:3", 1, 4), ("multivalue:4", 4, 4), ("multiquery:4", 4, 4), ("nolap", 1, 4),
        ("multikey:16", 1, 17), ("single", 1, 1), ("passkey", 1, 1),
    ):  # fmt: skip
        sample = builder(kind).build(task, length=2000, depth=0.5)
        assert (len(sample.support), len(sample.needles)) == (supports, all_needles)
    values = builder(kind).build("single", length=2000).answer_texts
    assert re.fullmatch(r"\d{7}", values[0])


@pytest.mark.parametrize("facts", [2, 3])
def test_stories_have_the_facts_asked_and_a_closed_set_of_answers(facts):
    answers = Counter()
    for index in range(60):
        sample = builder(TOKENIZERS[0]).build(f"babi:{facts}", length=1500, depth=0.7, index=index)
        assert len(sample.support) == facts and sample.needles[sample.pivot].supports
        # Nothing behind the deciding fact supports the answer.
        assert not any(needle.supports for needle in sample.needles[sample.pivot + 1 :])
        answers[sample.answer_texts[0]] += 1
        assert len({sample.answer_texts, *sample.decoy_texts}) == 8
    assert len(answers) == 8  # places, none of them rare
    assert max(answers.values()) < 20


def test_riddles_share_no_word_with_their_questions():
    ordinary = {"the", "a", "an", "at", "in", "of", "to", "is", "has", "been", "was", "with", "and"}
    assert len(RIDDLES) >= 24
    assert len({needle for needle, _ in RIDDLES}) == len({q for _, q in RIDDLES}) == len(RIDDLES)
    for needle, question in RIDDLES:
        assert needle.startswith("{name} ") and needle.endswith(".")
        said = {word[:5] for word in content(needle.replace("{name}", "")) - ordinary}
        asked = {word[:5] for word in content(question) - ordinary}
        assert not said & asked, (needle, question)


# What a sample depends on.


@settings(max_examples=8)
@given(st.permutations(SPECS), st.sampled_from(TOKENIZERS), st.integers(0, 5))
def test_samples_do_not_depend_on_order_or_on_other_samples(order, kind, seed):
    first = fresh(kind)
    expected = {
        spec: grid(first, spec, seed) for spec in [*SPECS[:6], "vt:3x2", "passkey", "babi:2"]
    }
    second = fresh(kind)
    # Longer ones first, so that whatever is kept is another size.
    second.build("vt", length=5000), second.build("passkey", length=3000)
    for spec in order:
        if spec in expected:
            assert grid(second, spec, seed) == expected[spec]


def test_samples_are_the_same_in_another_process():
    code = "import test_eval_tasks as t; print(t.digest())"
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = os.environ | {"PYTHONPATH": os.path.join(root, "tests"), "PYTHONHASHSEED": "77"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-1] == digest()


def test_every_part_of_the_key_makes_another_sample():
    made = builder(TOKENIZERS[0])
    cell = {"length": 1500, "depth": 0.5, "seed": 0, "index": 0}
    base = made.build("single", **cell)
    assert made.build("single", **cell) == base
    for change in ({"length": 1501}, {"depth": 0.51}, {"depth": None}, {"seed": 1}, {"index": 1}):
        other = made.build("single", **cell | change)
        assert other.answer_texts != base.answer_texts and other.key != base.key
    assert made.build("single:uuid", **cell).key != base.key
    windows = {tuple(made.build("single", **cell | {"index": i}).prompt[30:90]) for i in range(30)}
    assert len(windows) > 25  # of haystack, where there is no needle


def test_base_and_chat_prompts_ask_the_same():
    for spec in SPECS:
        depth = 0.3 if parse(spec).has_depth else None
        base, chat = (
            builder(TOKENIZERS[0], prompt).build(spec, length=2500, depth=depth)
            for prompt in ("base", "chat")
        )
        assert (base.is_chat, chat.is_chat) == (False, True)
        if parse(spec).has_depth:
            assert base.answer_texts == chat.answer_texts
            # In windows of other sizes, needles that keep no order may change places.
            said, asked = ({n.text for n in each.needles} for each in (base, chat))
            assert said == asked
    said = decoded(TOKENIZERS[0], chat.prompt)
    assert said.startswith("<s><user>Read the list")
    assert said.endswith("?</s><assistant>" + chat.answer_prefix)
    assert builder(TOKENIZERS[0], "chat").frame == ("<s><user>", "</s><assistant>")


def test_special_tokens_before_a_text_count_as_prompt():
    for kind, starts in zip(TOKENIZERS, (False, True, True), strict=True):
        sample = builder(kind).build("single", length=800, depth=0.5)
        assert (sample.prompt[0] == 1) == starts and sample.prompt.count(1) == starts
        assert 2 not in sample.prompt  # the end of a text that goes on


def test_a_tokenizer_that_does_not_round_trip_says_so():
    assert builder("byte-level BPE").round_trips
    assert not builder("WordPiece-like").round_trips


# What is refused.


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("singel", "unknown task 'singel', did you mean 'single'"),
        ("multi-key:4", "did you mean 'multikey'"),
        ("niah", "unknown task 'niah', did you mean"),
        ("", "unknown task ''"),
        ("multikey:0", "N distractors, 1 to 64"),
        ("multikey:", "N distractors"),
        ("vt:4", "CHAINSxHOPS"),
        ("vt:1x4x2", "CHAINSxHOPS"),
        ("cwe:3x2x2", "TIMES above OTHERS"),
        ("fwe:1", "ALPHA, above 1"),
        ("babi:4", "2 or 3 facts"),
        ("passkey:3", "nothing behind the colon"),
        ("single:word", "uuid behind the colon"),
    ],
)
def test_an_unknown_task_is_named_with_the_nearest(task, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        builder(TOKENIZERS[0]).build(task, length=2000)


def test_tasks_have_one_canonical_form():
    assert str(parse("vt")) == "vt:1x4" and parse("vt:1x4") == parse(" vt ")
    assert [str(parse(kind)) for kind in KINDS][:3] == ["single", "multikey:3", "multivalue:4"]
    for spec in SPECS:
        assert parse(str(parse(spec))) == parse(spec)
    for spec, name in RULER.items():
        assert str(parse(spec)) == spec and parse(spec).ruler == name
    assert parse("multikey:4").ruler is None
    assert builder(TOKENIZERS[0]).build(Spec("vt", (1, 4)), length=2000).task == "vt:1x4"


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_length_is_built_or_is_an_error_and_nothing_between(kind, spec):
    made = builder(kind)
    where = {"depth": 0.5} if parse(spec).has_depth else {}
    with pytest.raises(ValueError, match=r"take \d+ tokens, expected .* got 20$") as error:
        made.build(spec, length=20, **where)
    assert str(parse(spec)) in str(error.value)
    built = [builds(made, spec, length, where) for length in range(40, 1500, 73)]
    # Samples differ in their parts' tokens, so the border is not sharp, but it is one.
    first = built.index(True)
    assert not any(built[:first]) and all(built[first + 3 :]) and first > 0


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if parse(spec).has_depth])
def test_a_single_token_of_haystack_is_enough(kind, spec):
    made, length = builder(kind), 20
    for _ in range(20):
        try:
            sample = made.build(spec, length=length, depth=1.0)
        except ValueError as error:
            # One more than the fixed parts that it names; another length draws other names.
            length = int(re.search(r"take (\d+) tokens", str(error))[1]) + 1
        else:
            break
    assert len(sample.prompt) == length
    prompt = loose(decoded(kind, sample.prompt))
    assert solve(sample.task, prompt) == [part.lower() for part in sample.answer_texts]


def test_bad_haystacks_are_errors():
    made = tokenizer(TOKENIZERS[0])
    for content in ("", " \n\t ", "CHAPTER 1\n"):
        with pytest.raises(ValueError, match="haystack is empty"):
            PromptBuilder(made, content)
    with pytest.raises(ValueError, match="no sentence"):
        PromptBuilder(made, "words without an end")
    short = PromptBuilder(made, text.held_out()[:3000])
    with pytest.raises(ValueError, match=r"haystack has \d+ tokens, expected well over the \d+"):
        short.build("single", length=4000, depth=0.5)
    short.build("passkey", length=4000, depth=0.5)  # its noise has no end
    persons = "Agnesa Bartek Celestin Dagny Emeka Farid Giulia Hamza Ingrid Jovana Kenji Lubomir"
    persons += " Marisol Nadezh Oluwa Priya Quentin Radko Solveig Tomasz Uzoma Vilmos Wanjiru"
    full = PromptBuilder(made, text.held_out() + persons + " were there. They left.")
    with pytest.raises(ValueError, match="already holds 23 of our 26 persons"):
        full.build("nolap", length=2000)


def test_needles_say_nothing_that_the_haystack_holds_already():
    left = {"amber kettle", "tin walrus"}
    every = [f"{a} {n}" for a in words.ADJECTIVES for n in words.NOUNS]
    told = " ".join(f"The {key.upper()} fell. It broke." for key in every if key not in left)
    made = PromptBuilder(tokenizer(TOKENIZERS[0]), told)
    for index in range(8):
        sample = made.build("multikey:1", length=900, index=index)
        keys = {re.search(r"of the (\w+ \w+) is", needle.text)[1] for needle in sample.needles}
        assert keys == left
    with pytest.raises(ValueError, match="does not hold 3 of our things"):
        made.build("multikey:2", length=900)


def test_other_bad_arguments_are_errors():
    made = builder(TOKENIZERS[0])
    for depth in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="depth from 0 to 1"):
            made.build("single", length=1000, depth=depth)
    with pytest.raises(ValueError, match=r"expected no depth, got 0\.5"):
        made.build("cwe", length=5000, depth=0.5)
    with pytest.raises(ValueError, match="'bass'"):
        PromptBuilder(tokenizer(TOKENIZERS[0]), prompt="bass")
    with pytest.raises(ValueError, match="at least 1 decoy"):
        PromptBuilder(tokenizer(TOKENIZERS[0]), decoys=0)
    with pytest.raises(ValueError, match="a fast tokenizer, got object"):
        PromptBuilder(object())
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer(TOKENIZERS[0])._tokenizer)
    with pytest.raises(ValueError, match="no chat template"):
        PromptBuilder(plain, prompt="chat")
    assert PromptBuilder(plain, text.held_out()).frame is None  # auto
    plain.chat_template = "{{ messages[0]['content'] }}{{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match="once, got 2 times"):
        PromptBuilder(plain)


USER = "{% if m.role == 'user' %}<user>{{ m.content }}</s>{% else %}"
EACH, END = "{% for m in messages %}", "{% endfor %}"
SAYS, ALIKE = "<assistant>{{ m.content }}</s>{% endif %}", "<{{ m.role }}>{{ m.content }}</s>"
REASONS = "<assistant><think>\n\n</think>\n\n{{ m.content | trim }}</s>{% endif %}"
REFUSES = "{{ raise_exception('no assistant') }}{% endif %}"


def asks(words: str) -> str:
    return "{% if add_generation_prompt %}" + words + "{% endif %}"


@pytest.mark.parametrize(
    ("template", "behind"),
    [
        # Its generation prompt is where an answer stands, or all there is.
        (EACH + USER + SAYS + END + asks("<assistant>"), "</s><assistant>"),
        (EACH + USER + SAYS + END + asks("<assistant>\n"), "</s><assistant>\n"),
        (EACH + USER + REFUSES + END + asks("<assistant>"), "</s><assistant>"),
        (EACH + USER + "{% endif %}" + END + asks("<assistant>"), "</s><assistant>"),
        (EACH + "<user>{{ m.content }}</s>" + END + "<assistant>", "</s><assistant>"),
        # It opens a block of reasoning, which an answer is not part of.
        (EACH + USER + SAYS + END + asks("<assistant><think>\n"), "</s><assistant>"),
        (EACH + USER + SAYS + END + asks("<assistant>[THINK]"), "</s><assistant>"),
        (
            EACH + USER + REASONS + END + asks("<assistant><think>\n"),
            "</s><assistant><think>\n\n</think>\n\n",
        ),
        (
            EACH + USER + SAYS.replace("content }}", "content.split('</think>')[-1] }}") + END
            + asks("<assistant><think>\n"),
            "</s><assistant>",
        ),
        # It puts one, or a channel, before what the assistant says.
        (
            EACH + USER + REASONS + END + asks("<assistant>"),
            "</s><assistant><think>\n\n</think>\n\n",
        ),
        (
            EACH + USER + SAYS.replace(">{{", "><final>{{") + END + asks("<assistant>"),
            "</s><assistant><final>",
        ),
        # It has no generation prompt.
        (EACH + ALIKE + END, "</s><assistant>"),
        (EACH + ALIKE + END + "{{ eos_token }}", "</s><assistant>"),
        (EACH + USER.replace("</s>", "</u>") + " {{ m.content }}</s>{% endif %}" + END, "</u> "),
    ],
)  # fmt: skip
def test_an_answer_begins_where_the_template_has_the_assistants_words(template, behind):
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(TOKENIZERS[0])._tokenizer, eos_token="</s>"
    )
    made.chat_template = template
    built = PromptBuilder(made, text.held_out())
    assert built.frame == ("<user>", behind)
    sample = built.build("single", length=1000)
    said = made.decode(sample.prompt[-80:])
    assert said.endswith(f"{sample.question}{behind}{sample.answer_prefix}")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (EACH + USER + "{% endif %}" + END, "has no generation prompt, and has no place"),
        (EACH + USER + REFUSES + END, "has no generation prompt.* no assistant"),
        (EACH + USER + REFUSES + END + asks("<think>"), "opens a block .* no assistant"),
        (EACH + "{{ m.content | lower }}" + END, "user's words once, got 0 times"),
        (
            EACH + USER + SAYS.replace("content }}", "content | lower }}") + END + asks("<think>"),
            "does not give the assistant's words once",
        ),
        (EACH + "<user>{{ m.content }}" + END + asks("<think>"), "the assistant is the user to it"),
        ("{{ raise_exception('a system message first') }}", "for user: a system message first"),
        ("{{ messages[0].content + 1 }}", "cannot be written for user"),
        (EACH, "cannot be written for user"),
    ],
)  # fmt: skip
def test_a_template_without_a_place_for_an_answer_is_one_line(template, words):
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer(TOKENIZERS[0])._tokenizer)
    made.chat_template = template
    with pytest.raises(ValueError, match=f"template.*{words}") as error:
        PromptBuilder(made, text.held_out())
    assert "\n" not in str(error.value)
    assert PromptBuilder(made, text.held_out(), prompt="base").frame is None


def test_a_tokenizer_that_cannot_write_the_needles_is_an_error():
    words = Tokenizer(token_models.WordLevel({"<unk>": 0, "a": 1, ".": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    with pytest.raises(ValueError, match="no tokens for ' The secret number"):
        PromptBuilder(made, text.held_out()).build("single", length=1000)


def test_sentences_begin_behind_full_stops_of_any_script_and_not_behind_titles():
    made = tokenizer("byte-level BPE")

    def starts(content: str) -> list[str]:
        haystack = Haystack(content, made)
        return [made.decode(haystack.ids[i:])[:6].strip() for i in haystack.boundaries]

    assert starts('He went. "She stayed!" Mr. Allen left. J. Doe came.') == [
        '"She',
        "Mr. A",
        "J. Do",
    ]
    assert starts("Он ушёл. Дина там. и вот.") == ["Дина"]
    assert starts("他走了。她留下了。") == ["她留下了。"]
    assert starts("It cost 3.50 or 4. He paid e.g. ten.") == ["He pa"]


# The solvers and other helpers.


def loose(words: str) -> str:
    """As a lower-casing tokenizer that puts blanks around signs would leave it."""
    words = " ".join(words.lower().split())
    return re.sub(r"\s*-\s*", "-", re.sub(r"\s+([.,?!:'])", r"\1", words))


def solve(task: str, prompt: str) -> list[str]:
    """The answer, from the text alone."""
    body, _, question = prompt.rpartition("question:")
    kind = task.partition(":")[0]
    return globals()[f"solve_{kind}"](body, question)


def solve_single(body: str, question: str) -> list[str]:
    noun, key = re.search(r"what is the secret (\w+) of the (\w+ \w+)\?", question).groups()
    return re.findall(rf"the secret {noun} of the {key} is ([0-9a-f-]+)\.", body)


solve_multikey = solve_single


def solve_multivalue(body: str, question: str) -> list[str]:
    key = re.search(r"secret numbers of the (\w+ \w+), in the order", question)[1]
    return re.findall(rf"one secret number of the {key} is (\d+)\.", body)


def solve_multiquery(body: str, question: str) -> list[str]:
    keys = re.findall(r"the (\w+ \w+)(?=, the|\?)", question.partition("this order:")[2])
    said = re.findall(r"the secret number of the (\w+ \w+) is (\d+)\.", body)
    assert len(dict(said)) == len(said)
    return [dict(said).get(key, "") for key in keys]


def solve_passkey(body: str, question: str) -> list[str]:
    return re.findall(r"the pass key is the number (\d+)\.", body)


def solve_vt(body: str, question: str) -> list[str]:
    value = re.search(r"have the value (\d+)", question)[1]
    known: dict[str, str | None] = {}
    for name, source in re.findall(r"let (\w+) be (\w+)\.", body):
        known[name] = source if source.isdigit() else known.get(source)
    return [name for name, is_ in known.items() if is_ == value]


def solve_cwe(body: str, question: str) -> list[str]:
    asked = int((re.search(r"what are the (\d+)", question) or [0, 1])[1])
    words = re.findall("[a-z]+", body.partition("list:")[2].partition("</s>")[0])
    ranked = Counter(words).most_common(asked + 1)
    assert ranked[asked - 1][1] > ranked[asked][1]
    return sorted((word for word, _ in ranked[:asked]), key=words.index)


def solve_fwe(body: str, question: str) -> list[str]:
    ranked = Counter(re.findall("[a-z]+", body.partition("list:")[2])).most_common(4)
    counts = [count for _, count in ranked]
    assert counts == sorted(set(counts), reverse=True)
    return [word for word, _ in ranked[:3]]


def solve_nolap(body: str, question: str) -> list[str]:
    (needle,) = [needle for needle, asked in RIDDLES if loose(asked) in question]
    return re.findall(re.escape(loose(needle)).replace(r"\{name\}", r"(\w+)"), body)


def solve_babi(body: str, question: str) -> list[str]:
    places: dict[str, str] = {}
    holder: dict[str, str] = {}
    been: dict[str, list[str]] = {}
    step = r"(\w+) (?:went to the (\w+)|picked up the (\w+))\."
    for person, place, thing in re.findall(step, body):
        if thing:
            holder[thing] = person
            been[thing] = [places.get(person, "")]
        else:
            places[person] = place
            for held, by in holder.items():
                if by == person:
                    been[held].append(place)
    thing = re.search(r"(?:where is|where was) the (\w+)", question)[1]
    before = re.search(r"before it was in the (\w+)\?", question)
    path = been.get(thing, [""])
    if not before:
        return path[-1:]
    return [path[path.index(before[1]) - 1]] if before[1] in path else []


def listed(parts: tuple[str, ...]) -> str:
    return {1: "{}", 2: "{} and {}"}.get(
        len(parts), ", ".join(["{}"] * (len(parts) - 1)) + ", and {}"
    ).format(*parts)


def list_of(kind: str, sample: Sample) -> str:
    body = loose(decoded(kind, sample.prompt)).rpartition("question:")[0]
    return body.partition("list:")[2].partition("</s>")[0]


def content(sentence: str) -> set[str]:
    return set(re.findall(r"\w+", sentence.lower()))


def fixed_parts(kind: str, sample: Sample) -> tuple[list[int], list[int]]:
    """Ids of what stands before and behind the window, from the texts that they should have."""
    made = tokenizer(kind)
    ids = {"add_special_tokens": False}
    head_text = STORY_HEAD if sample.task.startswith("babi") else Template.head
    start = [1] if kind != "byte-level BPE" and not sample.is_chat else []
    before = "<s><user>" if sample.is_chat else ""
    head = start + made(before + head_text, **ids)["input_ids"]
    middle = f"\n\nQuestion: {sample.question}"
    if not sample.is_chat:
        middle += f"\nAnswer: {sample.answer_prefix}"
    skip = len(made("a", **ids)["input_ids"])
    tail = made("a" + middle, **ids)["input_ids"][skip:]
    if sample.is_chat:
        tail = tail + made("</s><assistant>" + sample.answer_prefix, **ids)["input_ids"]
    return head, tail


def contains(ids: list[int], window: list[int]) -> bool:
    whole, part = ("," + ",".join(map(str, each)) + "," for each in (ids, window))
    return part in whole


def fresh(kind: str) -> PromptBuilder:
    return PromptBuilder(tokenizer(kind), text.held_out()[:30_000], prompt="base", decoys=3)


def grid(made: PromptBuilder, spec: str, seed: int) -> list[Sample]:
    return [made.build(spec, length=n, seed=seed, index=1) for n in (900, 1400)]


def builds(made: PromptBuilder, spec: str, length: int, where: dict) -> bool:
    try:
        return len(made.build(spec, length=length, **where).prompt) == length
    except ValueError as error:
        assert "expected" in str(error)
        return False


def digest() -> str:
    """The hash of one sample of every task, by the byte-level tokenizer."""
    made = fresh("byte-level BPE")
    everything = [vars(made.build(spec, length=1500, seed=3, index=7)) for spec in SPECS]
    return hashlib.sha256(repr(everything).encode()).hexdigest()
