"""Scores, checks and losses of samples, against one plain forward without a cache."""

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from largest import Largest
from tiny_models import byte_tokenizer
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import hf_sigmoid
from hf_sigmoid import text
from hf_sigmoid.evals import PromptBuilder, Sample, loss
from hf_sigmoid.evals.attention import FIELDS, Observer, statistics
from hf_sigmoid.evals.checks import check
from hf_sigmoid.evals.prefix import NoCache, Prefix
from hf_sigmoid.evals.scoring import NoNumbers, Scorer

TOKENIZER = byte_tokenizer()
BUILDER = PromptBuilder(TOKENIZER, text.held_out())
SMALL = {
    "vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "initializer_range": 0.2, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def llama(**options):
    return LlamaForCausalLM(LlamaConfig(**SMALL | options))


def mistral(**options):
    """Every layer sees 100 keys: a cache that cannot be cropped."""
    return MistralForCausalLM(MistralConfig(**SMALL | {"sliding_window": 100} | options))


def gemma(**options):
    """A layer with a window and one without."""
    kinds = ["sliding_attention", "full_attention"]
    more = {"sliding_window": 64, "layer_types": kinds, "head_dim": 8}
    return Gemma3ForCausalLM(Gemma3TextConfig(**SMALL | more | options))


def gpt2(**options):
    """Positions that are added, and no grouped heads."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 4096}
    return GPT2LMHeadModel(GPT2Config(**SMALL | sizes | options))


def minimax():
    """States beside the layers of its cache."""
    torch.manual_seed(0)
    more = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "block_size": 64}
    kinds = ["full_attention", "linear_attention"]
    return MiniMaxForCausalLM(MiniMaxConfig(**SMALL | more, layer_types=kinds)).eval()


MODELS = {"llama": llama, "mistral": mistral, "gemma": gemma, "gpt2": gpt2}
WAYS = ["sdpa", "eager", "ssmax", "sigmoid"]


def model(kind: str, attn: str, seed: int = 0):
    """One under an attention function, whose per-query terms depend on n."""
    torch.manual_seed(seed)
    made = MODELS[kind]().eval()
    if attn in ("sdpa", "eager"):
        made.set_attn_implementation(attn)
        return made
    slope = 0.3 if attn == "ssmax" else -0.7
    hf_sigmoid.configure(made, attn, offset=0.5, slope=slope)
    return made


@torch.no_grad()
def plain(made, sample: Sample, answer: list[int]) -> torch.Tensor:
    """Log-probabilities [answer, vocabulary], every token in one forward."""
    ids = torch.tensor([sample.prompt + answer[:-1]])
    return made(ids, use_cache=False).logits[0, -len(answer) :].log_softmax(-1)


def total(logprobs: torch.Tensor, answer: list[int]) -> float:
    return logprobs[range(len(answer)), answer].sum().item()


def samples(task: str, length: int, count: int, depth: float | None = 0.5) -> list[Sample]:
    return [BUILDER.build(task, length=length, depth=depth, index=i) for i in range(count)]


@settings(max_examples=16)
@given(
    kind=st.sampled_from(list(MODELS)),
    attn=st.sampled_from(WAYS),
    task=st.sampled_from(["single", "multikey:2", "multivalue:2", "babi:2", "single:uuid"]),
    length=st.integers(700, 1000),
    count=st.integers(1, 2),
)
def test_scores_are_those_of_one_forward(kind, attn, task, length, count):
    made = model(kind, attn)
    asked = samples(task, length, count)
    for sample, result in zip(asked, Scorer(made, TOKENIZER).score(asked), strict=True):
        logprobs = plain(made, sample, sample.answer)
        own, size = total(logprobs, sample.answer), len(sample.answer)
        found = result["teacher"]
        assert found["logprob"] == pytest.approx(own / size, abs=2e-5)
        assert found["correct"] == (logprobs.argmax(-1).tolist() == sample.answer)
        others = [total(plain(made, sample, each), each) for each in sample.decoys]
        # A decoy within rounding of the answer may stand on either side of it.
        least, most = (sum(each > own + by for each in others) for by in (1e-3, -1e-3))
        assert least <= found["rank"] <= most
        assert found["candidates"] == 1 + len(sample.decoys)


@pytest.mark.parametrize("attn", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_questions_of_one_haystack_are_scored_as_if_alone(kind, attn):
    # One pair is enough for `generate`, which is transformers' own.
    scores = ("teacher", "generate") if (kind, attn) == ("gemma", "ssmax") else ("teacher",)
    scorer = Scorer(model(kind, attn), TOKENIZER, scores)
    asked = BUILDER.build_shared("multikey:5", length=900, depths=[0, 0.5, 1], each=1)
    together = scorer.score(asked)
    for sample, found in zip(asked, together, strict=True):
        (alone,) = scorer.score([replace(sample, shared=0)])
        assert found["teacher"]["logprob"] == pytest.approx(alone["teacher"]["logprob"], abs=2e-5)
        assert found.get("generate") == alone.get("generate")
    read = sum(found["tokens"] for found in together)
    assert read < 0.7 * sum(len(sample.prompt) for sample in asked)


@pytest.mark.parametrize("attn", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_an_answer_is_right_where_greedy_decoding_writes_it(kind, attn):
    made = model(kind, attn)
    (sample,) = samples("single", 720, 1)
    with torch.no_grad():
        greedy = made.generate(
            torch.tensor([sample.prompt]), do_sample=False, max_new_tokens=6, min_new_tokens=6
        )
    said = greedy[0, 720:].tolist()
    answers = [said, [*said[:2], (said[2] + 1) % 200, *said[3:]], said[:3]]
    asked = [replace(sample, answer=answer, answer_texts=("no",)) for answer in answers]
    results = Scorer(made, TOKENIZER, ("teacher", "generate")).score(asked)
    assert [each["teacher"]["correct"] for each in results] == [True, False, True]
    assert [each["generate"]["correct"] for each in results] == [True, False, True]


def test_generated_text_is_searched_for_each_part_and_holds_no_prompt():
    made = model("llama", "sdpa")
    asked = samples("multivalue:2", 800, 1)
    (result,) = Scorer(made, TOKENIZER, ("generate",)).score(asked)
    said = result["generate"]["text"]
    assert "secret" not in said and result["generate"]["contains"] == 0
    parts = (said[1:4].upper(), "absent")
    (result,) = Scorer(made, TOKENIZER, ("generate",)).score(
        [replace(asked[0], answer_texts=parts)]
    )
    assert result["generate"]["contains"] == 0.5


def test_tokens_are_all_that_the_model_was_given(monkeypatch):
    made, given = model("llama", "sdpa"), []

    def count(module, args, kwargs):
        given.append(kwargs["input_ids"].numel())

    made.register_forward_pre_hook(count, with_kwargs=True)
    scorer = Scorer(made, TOKENIZER, ("teacher", "generate"))
    asked = BUILDER.build_shared("multikey:5", length=900, depths=[0, 1], each=3)
    assert sum(each["tokens"] for each in scorer.score(asked)) == sum(given)
    given.clear()
    found = scorer.score(samples("single", 720, 2))
    assert sum(each["tokens"] for each in found) == pytest.approx(sum(given), abs=2)


@pytest.mark.parametrize("attn", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_attention_on_the_needle_is_that_of_the_whole_map(kind, attn):
    made, asked = model(kind, attn), samples("multikey:2", 720, 2)
    results = Scorer(made, TOKENIZER).score(asked, observer=Observer(made))
    if attn == "sdpa":
        made.set_attn_implementation("eager")
    for sample, result in zip(asked, results, strict=True):
        ids = torch.tensor([sample.prompt + sample.answer[:-1]])
        with torch.no_grad():
            maps = made(ids, use_cache=False, output_attentions=True).attentions
        (span,) = sample.support
        rows = slice(len(sample.prompt) - 1, None)
        for layer, weights in enumerate(maps):
            mine = weights[0, :, rows].double()
            p = mine / mine.sum(-1, keepdim=True)
            expected = {
                "mass": mine[..., slice(*span)].sum(-1),
                "total": mine.sum(-1),
                "share": p[..., slice(*span)].sum(-1),
                "n_eff": torch.special.entr(p).sum(-1).exp(),
                "n_eff_2": 1 / p.square().sum(-1),
            }
            assert set(expected) == set(FIELDS)
            for field, value in expected.items():
                found = torch.tensor(result["attention"][field][layer], dtype=torch.double)
                torch.testing.assert_close(found, value.mean(-1), rtol=2e-3, atol=2e-5)
        assert result["attention"]["keys"] == pytest.approx(
            sum(range(720, 720 + len(sample.answer))) / len(sample.answer)
        )
    assert made.config._attn_implementation == ("eager" if attn == "sdpa" else attn)
    assert not any(hasattr(module, "_hf_sigmoid_rows") for module in made.modules())


def test_statistics_of_rows_without_weights_are_zero():
    weights, needle = torch.zeros(1, 2, 3, 5), torch.ones(1, 5, dtype=torch.bool)
    found = statistics(weights, needle, torch.ones(1, 3))
    assert all(value.tolist() == [[0.0, 0.0]] for value in found.values())


@settings(max_examples=15)
@given(
    kind=st.sampled_from(list(MODELS)),
    attn=st.sampled_from(WAYS),
    length=st.sampled_from([2, 3, 511, 512, 513, 514, 1024, 1025, 1300]),
)
def test_losses_are_those_of_one_forward(kind, attn, length):
    made = model(kind, attn)
    ids = BUILDER.haystack.ids[:length]
    with torch.no_grad():
        logits = made(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    torch.testing.assert_close(loss.losses(made, ids), expected, rtol=1e-4, atol=1e-4)


def test_windows_of_the_loss_do_not_overlap_and_are_seeded():
    ids = list(range(1000))
    chosen = loss.windows(ids, 90, 11, seed=1)
    assert chosen == loss.windows(ids, 90, 11, seed=1)
    assert len({each for window in chosen for each in window}) == 990
    assert loss.windows(ids, 90, 5, seed=1) != loss.windows(ids, 90, 5, seed=2)
    with pytest.raises(ValueError, match=r"12 windows of 90 tokens were asked for, .* has 11"):
        loss.windows(ids, 90, 12, seed=1)


@pytest.mark.parametrize("attn", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_sound_model_passes_every_check(kind, attn):
    found = check(model(kind, attn), *samples("single", 720, 2))
    assert not found.failed and found.record()["passed"]
    assert max(found.cached, found.batched, found.padded, found.generated) < 1e-4


@pytest.mark.parametrize("attn", ["ssmax", "sigmoid"])
@pytest.mark.parametrize("bug", ["cache", "padding", "batch"])
def test_a_backend_that_counts_keys_wrongly_fails_a_check(attn, bug, monkeypatch):
    """n is off: by the prompt's length under a cache, by hidden keys, or with another row there."""
    made, (probe, other) = model("llama", attn), samples("single", 720, 2)
    honest = hf_sigmoid.masks.visible_keys

    def wrong(mask, M, N, *rest):
        visible, is_causal, bias, log_n = honest(mask, M, N, *rest)
        count = log_n.exp()
        if bug == "cache":
            count = (count - (N - M)).clamp(min=1)
        if bug == "padding" and mask is not None:
            count = torch.arange(1, N + 1)[-M:].expand_as(count).to(count)
        if bug == "batch" and len(count) > 1:
            count = count + 50
        return visible, is_causal, bias, count.log()

    monkeypatch.setattr(hf_sigmoid.masks, "visible_keys", wrong)
    found = check(made, probe, other)
    name = {"cache": "cached", "padding": "padded", "batch": "batched"}[bug]
    assert found.failed[name] > 5 * found.tolerance and not found.record()["passed"]


def test_logits_that_are_no_numbers_are_not_scored():
    made = model("llama", "sdpa")
    made.model.norm.weight.data.fill_(math.nan)
    assert set(check(made, *samples("single", 720, 2)).failed) >= {"cached", "batched"}
    for score in ("teacher", "generate"):
        with pytest.raises(NoNumbers, match=r"not (a number|numbers)"):
            Scorer(made, TOKENIZER, (score,)).score(samples("single", 720, 1))


@pytest.mark.parametrize("kind", [*MODELS, "minimax"])
def test_a_borrowed_prefix_is_afterwards_as_it_was(kind):
    made = minimax() if kind == "minimax" else model(kind, "sdpa")
    ids = torch.tensor([BUILDER.haystack.ids[:300]])
    with torch.no_grad():
        prefix = Prefix.read(made, ids[:, :200])
        first = prefix.logits(ids[:, 200:210])
        with prefix.longer(ids[:, 200:250]) as longer:
            further = longer.logits(ids[:, 250:260])
        assert torch.equal(prefix.logits(ids[:, 200:210]), first)
        whole = made(ids[:, :260], use_cache=False).logits[:, -10:]
    assert prefix.length == 200
    torch.testing.assert_close(further, whole, rtol=1e-4, atol=1e-4)


def test_a_model_without_a_cache_is_refused():
    class Forgetful(torch.nn.Module):
        def forward(self, input_ids, use_cache=False):
            return type("Result", (), {"logits": torch.zeros(*input_ids.shape, 5)})()

    with pytest.raises(NoCache, match="Forgetful keeps no cache"):
        Prefix.read(Forgetful(), torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize("attn", ["sdpa", "ssmax", "sigmoid"])
def test_32k_tokens_make_neither_all_logits_nor_a_map(attn):
    """A layer of three of SmolLM2's nine heads, a small vocabulary; `memory_32k.py` has all."""
    length, hidden = 32768, 192
    config = LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=512, num_hidden_layers=1,
        num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=40_000,
    )  # fmt: skip
    made = LlamaForCausalLM(config).eval()
    made.set_attn_implementation(attn)
    sample = samples("single", 1000, 1)[0]
    noise = torch.randint(200, (length - 1000,)).tolist()
    asked = [replace(sample, prompt=noise + sample.prompt, decoys=sample.decoys[:1])]
    with Largest() as seen:
        (result,) = Scorer(made, TOKENIZER, ("teacher",)).score(asked, observer=Observer(made))
    assert result["teacher"]["logprob"] < 0 and result["attention"]["keys"] > length
    # The feed-forward layer's values. All logits would be twice as many, a map 64 times.
    assert seen.elements <= length * 512
