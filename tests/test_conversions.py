"""Conversions: ssmax starts as the identity, sigmoid near the softmax, bad input writes nothing."""

import json
import shutil

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import hf_sigmoid
from hf_sigmoid import text
from hf_sigmoid.conversions import calibrate, checkpoint, convert, perplexity, token_windows
from hf_sigmoid.conversions.__main__ import main
from hf_sigmoid.conversions.convert import to_sigmoid

SMALL = {"window": 32, "windows": 6, "progress": False}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    """A llama that reads bytes, trained for a moment so that its attention looks somewhere."""
    folder = tmp_path_factory.mktemp("source")
    tokenizer = tiny_models.byte_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    windows = token_windows(tokenizer, text.train()[:60_000], 32, 400)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in windows.split(8):
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return str(folder)


def logits(path, ids, **kwargs):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path).eval()(ids, **kwargs).logits


def test_ssmax_starts_as_the_identity_to_the_last_bit(source, tmp_path):
    report = convert(source, tmp_path / "out", "ssmax", **SMALL)
    ids = torch.randint(0, 256, (2, 40))
    assert torch.equal(logits(source, ids), logits(tmp_path / "out", ids))
    padding = torch.ones_like(ids)
    padding[0, :7] = 0
    before, after = (logits(p, ids, attention_mask=padding) for p in (source, tmp_path / "out"))
    torch.testing.assert_close(before[padding.bool()], after[padding.bool()], atol=1e-5, rtol=1e-5)
    assert report["perplexity_before"] == report["perplexity_after"]
    assert json.loads((tmp_path / "out" / "conversion.json").read_text()) == report
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    holders = {name: t for name, t in tensors.items() if "log_length" in name}
    assert len(holders) == 4
    assert all(
        (t == (1.0 if name.endswith("offset") else 0.0)).all() for name, t in holders.items()
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab")["input_ids"]


@pytest.mark.parametrize("query", [False, True])
def test_sigmoid_starts_from_the_fit(source, tmp_path, query):
    report = convert(source, tmp_path / "out", "sigmoid", query=query, **SMALL)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config._attn_implementation == "sigmoid"
    # Nearer to the softmax model than the bias that knows nothing of it.
    ids = token_windows(AutoTokenizer.from_pretrained(source), text.held_out(), 32, 6)
    untold = AutoModelForCausalLM.from_pretrained(source, attn_implementation="sigmoid")
    softmax = logits(source, ids)
    with torch.no_grad():
        near, far = ((model(ids).logits - softmax).square().mean() for model in (loaded, untold))
    assert 0 < near < far
    assert perplexity(loaded, ids, progress=False) == pytest.approx(report["perplexity_after"])
    assert set(report["residual_nats"]) == {"model.layers.0.self_attn", "model.layers.1.self_attn"}


def test_calibration_is_least_squares_on_the_log_sum_exp(source):
    """The same fit by hand from the eager model's logits, and the model left as it was found."""
    model = AutoModelForCausalLM.from_pretrained(source)
    ids = token_windows(AutoTokenizer.from_pretrained(source), text.train(), 24, 4)
    fits = calibrate(model, ids.split(2), progress=False)
    assert model.config._attn_implementation == "sdpa" and not hasattr(model.config, "hf_sigmoid")

    seen = {}

    def keep_projections(module, _, kwargs):
        hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        q, k = (
            projection(hidden).view(*hidden.shape[:2], -1, 8).transpose(1, 2)
            for projection in (module.q_proj, module.k_proj)
        )
        seen["q"], seen["k"] = apply_rotary_pos_emb(q, k, cos, sin)

    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(keep_projections, with_kwargs=True)
    with torch.no_grad():
        model(ids)
    q, k = seen["q"].double(), seen["k"].double().repeat_interleave(2, 1)
    z = (q @ k.transpose(2, 3) * 8**-0.5).masked_fill(~torch.ones(24, 24).tril().bool(), -torch.inf)
    log_sum_exp = z.logsumexp(-1)
    log_n = torch.arange(1, 25).log().double().expand(4, 24)
    features = torch.stack([torch.ones_like(log_n), log_n], -1).flatten(0, 1)
    fit = fits["model.layers.1.self_attn"]
    for head in range(4):
        target = log_sum_exp[:, head].flatten()
        solution = torch.linalg.lstsq(features, target[:, None]).solution.squeeze()
        torch.testing.assert_close(
            torch.stack([fit.offset[head], fit.slope[head]]), -solution, atol=1e-5, rtol=1e-5
        )
        residual = (features @ solution - target).square().mean().sqrt()
        torch.testing.assert_close(fit.residual[head], residual, atol=1e-4, rtol=1e-4)


def test_a_better_fit_leaves_a_smaller_residual(source):
    model = AutoModelForCausalLM.from_pretrained(source)
    ids = token_windows(AutoTokenizer.from_pretrained(source), text.train(), 24, 8)
    plain, with_query = (
        calibrate(model, ids.split(4), query=q, progress=False) for q in (False, True)
    )
    for name in plain:
        assert (with_query[name].residual < plain[name].residual).all()


def test_layers_that_are_not_named_stay_softmax(source, tmp_path):
    convert(source, tmp_path / "out", "sigmoid", layers=[1], **SMALL)
    names = [n for n in load_file(tmp_path / "out" / "model.safetensors") if "log_length" in n]
    assert len(names) == 2 and all("layers.1." in name for name in names)


def test_a_failed_identity_check_writes_nothing(source, tmp_path, monkeypatch):
    from hf_sigmoid import configuration

    wrong = {**configuration.DEFAULTS["ssmax"], "offset": 1.01}
    monkeypatch.setitem(configuration.DEFAULTS, "ssmax", wrong)
    with pytest.raises(
        ValueError, match="ssmax at its identity must not change logits by more than"
    ):
        convert(source, tmp_path / "out", "ssmax", **SMALL)
    assert not list(tmp_path.iterdir())


def bad_inputs(source, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    (tmp_path / "empty.txt").write_text(" \n")
    bloom = tmp_path / "bloom"
    BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=4).save_pretrained(bloom)
    bert = tmp_path / "bert"
    AutoConfig.for_model("vit", hidden_size=32).save_pretrained(bert)
    composite = tmp_path / "composite"
    AutoConfig.for_model("gemma3").save_pretrained(composite)
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    pickled = tmp_path / "pickled"
    shutil.copytree(source, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    converted = tmp_path / "converted"
    config = LlamaConfig.from_pretrained(source)
    hf_sigmoid.configure(config, "ssmax")
    config.save_pretrained(converted)
    return {
        "target": ({"target": full}, "must be a new or empty folder, got .*full"),
        "function": (
            {"function": "softplus"},
            "--to must be one of sigmoid, ssmax, got 'softplus'",
        ),
        "no_text": (
            {"calibration": tmp_path / "nowhere"},
            "calibration text must be a file, got .*nowhere",
        ),
        "no_words": (
            {"evaluation": tmp_path / "empty.txt"},
            "evaluation text must not be empty, got",
        ),
        "off_interface": ({"source": bloom}, "BloomForCausalLM does not go through transformers'"),
        "not_a_language_model": (
            {"source": bert},
            "must be a causal language model, got model type 'vit'",
        ),
        "converted": (
            {"source": converted},
            "must run softmax, got one already converted to ssmax",
        ),
        "layer": ({"layers": [5]}, "layers must be indices from 0 to 1, got 5"),
        "window": ({"window": 65}, "window must be at most the model's 64 positions, got 65"),
        "query": ({"function": "ssmax", "query": True}, "for sigmoid only, got 'ssmax'"),
        "composite": (
            {"source": composite},
            "plain language model, got 'gemma3', which is composed",
        ),
        "short_window": ({"window": 1}, "a window of at least 2 tokens and 1 window, got 1 and 6"),
        "no_windows": ({"windows": 0}, "a window of at least 2 tokens and 1 window, got 32 and 0"),
        "no_layers": ({"layers": []}, "at least one layer to convert, got none"),
        "below_a_file": (
            {"target": full / "notes.txt" / "x"},
            "in a folder that can be written, got",
        ),
        "broken": ({"source": broken}, "broken: a safetensors file cannot be read"),
    }


CASES = (
    "target", "function", "no_text", "no_words", "off_interface", "not_a_language_model",
    "converted", "layer", "window", "query", "composite", "short_window", "no_windows", "no_layers",
    "below_a_file", "broken",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_named_and_writes_nothing(source, tmp_path, case):
    change, message = bad_inputs(source, tmp_path)[case]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    arguments = {
        "source": source,
        "target": tmp_path / "out",
        "function": "sigmoid",
        **SMALL,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        convert(**arguments)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_pickles_are_not_loaded(source, tmp_path):
    bad_inputs(source, tmp_path)
    with pytest.raises(OSError, match="safetensors"):
        convert(tmp_path / "pickled", tmp_path / "out", "ssmax", **SMALL)
    assert not (tmp_path / "out").exists()


def test_an_empty_folder_may_be_named_by_a_link(source, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    convert(source, tmp_path / "link", "ssmax", **SMALL)
    assert (tmp_path / "real" / "config.json").exists() and (tmp_path / "link").is_symlink()


def test_command_line_prints_one_line_and_its_errors_too(source, tmp_path, capsys):
    options = ["--to", "ssmax", "--window", "32", "--windows", "2"]
    assert main(["convert", source, str(tmp_path / "out"), *options]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert main(["convert", source, str(tmp_path / "out"), *options]) == 2
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith("hf-sigmoid: the output must be a new")
    )


@pytest.mark.real
def test_real_model_ssmax_is_the_same_and_sigmoid_is_near():
    """SmolLM2-135M: identical logits with ssmax; a calibrated sigmoid beats b = −log n by far."""
    path = checkpoint("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(path)
    held_out = token_windows(tokenizer, text.held_out(), 128, 2)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        softmax = model(held_out).logits
    before = perplexity(model, held_out, progress=False)
    calibration = token_windows(tokenizer, text.train(), 128, 8)
    fits = calibrate(model, calibration.split(4), query=True, progress=False)

    hf_sigmoid.configure(model, "ssmax")
    with torch.no_grad():
        assert torch.equal(model(held_out).logits, softmax)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    words = tokenizer.decode(model.generate(**prompt, max_new_tokens=3, do_sample=False)[0])
    assert "Paris" in words

    hf_sigmoid.configure(model, "sigmoid")
    untold = perplexity(model, held_out, progress=False)
    to_sigmoid(model, fits)
    assert before < 100 < perplexity(model, held_out, progress=False) < untold / 10
