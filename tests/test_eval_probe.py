"""Needles and losses of a model in memory: what conversions and training runs ask."""

import math

import pytest
import torch
from test_eval_scoring import BUILDER, TOKENIZER, WAYS, model, plain, total

from hf_sigmoid import text
from hf_sigmoid.conversions.compare import perplexity
from hf_sigmoid.evals.loss import summed_loss, token_losses
from hf_sigmoid.evals.probe import needle_prompts, score
from hf_sigmoid.evals.scoring import Scorer


def test_its_samples_are_those_of_the_task_single():
    made, left_out = needle_prompts(text.held_out(), TOKENIZER, [700, 900], samples=2, seed=3)
    assert not left_out and list(made) == [700, 900]
    assert made[900] == [
        BUILDER.build("single", length=900, depth=depth, seed=3, index=index)
        for depth in (0.0, 0.5, 1.0)
        for index in range(2)
    ]


def test_lengths_that_cannot_be_asked_are_named():
    ask = {"depths": [0.5], "positions": 805}
    made, left_out = needle_prompts(text.held_out(), TOKENIZER, [100, 700, 800, 10**6], **ask)
    assert list(made) == [700] and list(left_out) == [100, 800, 10**6]
    assert "the fixed parts of single take" in left_out[100]
    assert left_out[800] == "with its answer it has 808 tokens, the model 805"
    assert "give a longer text" in left_out[10**6]
    with pytest.raises(ValueError, match="no sentence"):
        needle_prompts("words without an end", TOKENIZER, [700])


@pytest.mark.parametrize("attn", WAYS)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma"])
def test_its_scores_are_those_of_an_evaluation(kind, attn):
    made = model(kind, attn).train()
    ((_, samples),) = needle_prompts(text.held_out(), TOKENIZER, [720])[0].items()
    with torch.no_grad():
        said = made.eval().generate(torch.tensor([samples[0].prompt]), max_new_tokens=3)
    # One that is right, and shorter than the others.
    samples[0].answer[:] = said[0, 720:].tolist()
    made.train()
    found = score(made, samples, batch_size=2)
    assert made.training and found[0][0]
    made.eval()
    for sample, (right, logprob) in zip(samples, found, strict=True):
        expected = total(plain(made, sample, sample.answer), sample.answer)
        assert logprob == pytest.approx(expected / len(sample.answer), abs=2e-5)
        judged = Scorer(made, TOKENIZER).score([sample])[0]["teacher"]
        assert right == judged["correct"]
        assert logprob == pytest.approx(judged["logprob"], abs=2e-5)


def test_a_model_that_has_diverged_has_a_score():
    made = model("llama", "sdpa")
    made.model.norm.weight.data.fill_(math.nan)
    ((_, samples),) = needle_prompts(text.held_out(), TOKENIZER, [720], depths=[0.5])[0].items()
    ((right, logprob),) = score(made, samples)
    assert not right and math.isnan(logprob)


def test_losses_are_summed_over_all_tokens_but_the_first_of_each_window():
    made = model("llama", "ssmax")
    windows = torch.tensor(BUILDER.haystack.ids[: 4 * 90]).view(4, 90)
    with torch.no_grad():
        logits = made(windows, use_cache=False).logits[:, :-1].transpose(1, 2)
        expected = torch.nn.functional.cross_entropy(logits, windows[:, 1:], reduction="none")
        torch.testing.assert_close(token_losses(made, windows), expected)
    nats, tokens = summed_loss(made, windows)
    assert (nats, tokens) == (pytest.approx(expected.sum().item()), 4 * 89)
    alone = [summed_loss(made, window) for window in windows]
    assert sum(each for each, _ in alone) == pytest.approx(nats)
    assert {count for _, count in alone} == {89}
    found = perplexity(made, windows, progress=False)
    assert math.exp(nats / tokens) == pytest.approx(found, rel=1e-6)
