"""The needle prompts and scores of conversions and of training's probe."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sigmoid import text
from hf_sigmoid.conversions.haystack import Haystack
from hf_sigmoid.conversions.needles import score_answers


@pytest.fixture(scope="module")
def haystack(tiny) -> Haystack:
    return Haystack(text.held_out(), AutoTokenizer.from_pretrained(tiny))


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("length", [240, 300, 2000], ids=["barely", "short", "long"])
def test_prompts_have_exactly_the_length_and_depth_asked(haystack, length, depth):
    decode = haystack.tokenizer.decode
    for index in range(8):
        sample = haystack.sample(length=length, depth=depth, seed=3, index=index)
        assert len(sample.prompt) == length
        start, stop = sample.needle
        sentence = f" The special access code for {sample.city} is {sample.value}."
        assert decode(sample.prompt[start:stop]) == sentence
        assert decode(sample.prompt).count(sample.value) == 1
        assert decode(sample.prompt).endswith(f"access code for {sample.city} is")
        assert decode(sample.answer) == f" {sample.value}"
        assert sample.realised_depth == pytest.approx(depth, abs=0.5)
        if length == 2000:
            assert sample.realised_depth == pytest.approx(depth, abs=1e-3)
        # A sentence ends before the needle, or none has begun.
        assert decode(sample.prompt[:start]).rstrip("\"')")[-1] in ".!?:"


def test_samples_differ_and_do_not_depend_on_order(haystack):
    cell = {"length": 400, "depth": 0.5, "seed": 0}
    samples = [haystack.sample(**cell, index=i) for i in range(6)]
    assert len({tuple(sample.prompt) for sample in samples}) == 6
    assert haystack.sample(**cell, index=4) == samples[4]
    assert haystack.sample(**cell | {"seed": 1}, index=4) != samples[4]


@pytest.mark.parametrize("length", [60, 10**6], ids=["shorter than the question", "longer"])
def test_a_length_that_cannot_be_built_is_an_error(haystack, length):
    with pytest.raises(ValueError, match="expected"):
        haystack.sample(length=length, depth=0.5, seed=0, index=0)


def test_the_score_is_that_of_greedy_decoding(tiny, haystack):
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    made = haystack.sample(length=260, depth=0.5, seed=0, index=0)
    ids = torch.tensor([made.prompt])
    greedy = model.generate(ids, do_sample=False, max_new_tokens=5, min_new_tokens=5)
    said = greedy[0, 260:].tolist()
    wrong = [*said[:2], (said[2] + 1) % 256, *said[3:]]
    answers = [said, wrong, said[:3]]
    samples = [type(made)(**{**vars(made), "answer": answer}) for answer in answers]
    right, changed, shorter = score_answers(model, samples)
    assert right["correct"] and shorter["correct"] and not changed["correct"]
    with torch.no_grad():
        logprobs = model(greedy).logits[0, 259:-1].log_softmax(-1)
    expected = logprobs[range(5), said].mean().item()
    assert right["logprob"] == pytest.approx(expected, rel=1e-4)
