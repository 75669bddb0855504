"""Recorded largest logits and the probe's figures against logits computed by hand in float64."""

import contextlib
import copy
import json
import math
from pathlib import Path

import optim_worker
import pytest
import releases
import tiny_models
import torch
from gloo import rows_of
from peft import LoraConfig, get_peft_model
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import hf_sigmoid
from hf_sigmoid import functional
from hf_sigmoid.logit_control.monitor import Health, record, summary
from hf_sigmoid.replace_attention import STAND_IN

WORKER = Path(optim_worker.__file__)
IDS = tiny_models.tokens(3, 12)
LAYERS = [f"model.layers.{n}.self_attn" for n in range(2)]
FUNCTIONS = ("sigmoid", "ssmax")
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}  # of float32 logits of some 10


def build(function):
    """A llama whose attention is far from uniform; `function` may be one of transformers'."""
    model = tiny_models.converted("llama", function if function in FUNCTIONS else "ssmax")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(6)
    if function in FUNCTIONS:
        return model
    plain = tiny_models.build("llama", attn_implementation=function)
    state = {n: p for n, p in model.state_dict().items() if "log_length" not in n}
    plain.load_state_dict(state)
    return plain


def by_hand(model, ids):
    """Of each layer z and the final logits x `[B, H, M, N]`, NaN where hidden; causal rows."""
    inputs = []

    def note(module, args, kwargs):
        inputs.append((kwargs["hidden_states"], kwargs["position_embeddings"]))

    layers = [layer.self_attn for layer in model.model.layers]
    hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in layers]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    found, (B, T) = {}, ids.shape
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    log_n = torch.arange(1, T + 1).double().log()
    for name, module, (hidden, (cos, sin)) in zip(LAYERS, layers, inputs, strict=True):
        with torch.no_grad():
            q, k = (
                p(hidden).view(B, T, -1, 8).transpose(1, 2) for p in (module.q_proj, module.k_proj)
            )
            q, k = (x.double() for x in apply_rotary_pos_emb(q, k, cos, sin))
            z = q @ k.repeat_interleave(2, 1).mT / math.sqrt(8)
            x = z
            if (holder := getattr(module, "log_length", None)) is not None:
                row = holder.offset[:, None] + holder.slope[:, None] * log_n
                if holder.query is not None:
                    row = row + torch.einsum("bhmd,hd->bhm", q, holder.query.double())
                if holder.hidden is not None:
                    u, given = holder.hidden.double(), hidden.double()
                    row = row + torch.einsum("bmc,hc->bhm", given, u)
                row = row.expand(B, 4, T)[..., None]
                x = z + row if holder.function == "sigmoid" else z * row
        found[name] = tuple(each.masked_fill(future, math.nan) for each in (z, x))
    return found


def largest(logits):
    return logits.nan_to_num(-math.inf).amax((0, 2, 3)).float()


def weights(function, x):
    x = x.nan_to_num(-math.inf)
    return x.sigmoid() if function == "sigmoid" else x.softmax(-1)


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return contextlib.nullcontext()


MODES = {
    "training": lambda model: contextlib.nullcontext(),
    "checkpointed": checkpointed,
    "autocast": lambda model: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_recorded_maxima_are_those_of_the_logits(function, mode):
    model = build(function)
    expected = by_hand(model, IDS)
    with MODES[mode](model), record(model.train()) as recorder:
        assert recorder.max_logits() == {}
        for rows in (IDS[:1], IDS[1:]):  # a running maximum
            model(rows, labels=rows, use_cache=False).loss.backward()
        found = [recorder.max_logits(final=final) for final in (False, True)]
    tolerance = {"atol": 0.3, "rtol": 0.05} if mode == "autocast" else TOLERANCE
    for name, each in expected.items():
        for mine, logits in zip(found, each, strict=True):
            top = largest(logits)
            if function == "ssmax" and mine is found[0]:
                # The first row's multiplier may be below zero, and then says nothing of max z.
                top = largest(logits[:, :, 1:])
                assert (mine[name] >= top - 1).all()
            torch.testing.assert_close(mine[name], top, **tolerance)
    assert not any(hasattr(m, "_hf_sigmoid_maxima") for m in model.modules())


def test_a_negative_multiplier_gives_the_largest_of_minus_z():
    model = build("ssmax")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.log_length.offset.fill_(-2.0)
            layer.self_attn.log_length.slope.zero_()
    expected = by_hand(model, IDS)
    with record(model) as recorder, torch.no_grad():
        model(IDS)
    for name, (z, _) in expected.items():
        torch.testing.assert_close(recorder.max_logits()[name], largest(-z), **TOLERANCE)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_recording_changes_no_result(function):
    results = []
    for context in (lambda model: contextlib.nullcontext(), record):
        model = build(function)
        with context(model):
            loss = model(IDS, labels=IDS, use_cache=False).loss
            loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_attentions_that_are_asked_for_are_recorded_too():
    model = build("sigmoid")
    with record(model) as recorder, torch.no_grad():
        assert model(IDS, output_attentions=True).attentions is not None
    for name, (_, x) in by_hand(model, IDS).items():
        torch.testing.assert_close(recorder.max_logits(final=True)[name], largest(x), **TOLERANCE)


def test_recording_is_this_models_alone_and_ends_with_an_error(monkeypatch):
    asked = []

    def spy(*args, return_statistics=False, **kwargs):
        asked.append(return_statistics)
        return original(*args, return_statistics=return_statistics, **kwargs)

    original = functional.sigmoid_attention
    monkeypatch.setattr(functional, "sigmoid_attention", spy)
    model, other = build("sigmoid"), build("sigmoid")
    with pytest.raises(RuntimeError, match="stop"), record(model) as recorder:
        other(IDS)
        assert recorder.max_logits() == {} and asked == [False, False]
        model(IDS)
        assert asked[2:] == [True, True]
        with pytest.raises(ValueError, match="being recorded already"), record(model):
            pass
        recorder.reset()
        assert recorder.max_logits() == {}
        raise RuntimeError("stop")
    model(IDS)
    assert asked[4:] == [False, False]
    with record(model), torch.no_grad():
        model(IDS)


def test_a_recorded_model_compiles_to_one_graph():
    model = build("sigmoid")
    with record(model) as recorder, torch.no_grad():
        model(IDS)
        eager = recorder.max_logits()
        recorder.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for rows in (IDS[:1], IDS[1:2], IDS[2:]):
            compiled(rows, use_cache=False)
        found = recorder.max_logits()
    for name in LAYERS:
        torch.testing.assert_close(found[name], eager[name], **TOLERANCE)


def test_a_model_without_such_modules_is_refused():
    with pytest.raises(ValueError, match="no attention module"), record(torch.nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize("function", [*FUNCTIONS, "sdpa", "eager"])
def test_the_probes_figures_are_those_of_the_logits(function):
    model = build(function)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(6)  # some rows are saturated
    health = Health(model, IDS)
    before = by_hand(model, IDS)
    first = health.measure()
    assert list(first) == LAYERS
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "log_length" not in name:
                parameter.mul_(1.1)
    after = by_hand(model, IDS)
    second, third = health.measure(), health.measure()
    for name, (_, x) in after.items():
        p = weights(function, x)
        figures = second[name]
        change = (x - before[name][1]).abs().transpose(0, 1).flatten(1).nanmean(1)
        for key, expected in {
            "max_logit": largest(x), "mean_change": change.float(),
            "row_sum": p.sum(-1).mean((0, 2)).float(),
            "saturated": (p.amax(-1) > 0.99).double().mean((0, 2)).float(),
        }.items():  # fmt: skip
            torch.testing.assert_close(figures[key], expected, **TOLERANCE)
            assert expected.std() > 0 or key == "row_sum"
        assert first[name]["mean_change"] is None
        assert (third[name]["mean_change"] == 0).all()
        holder = getattr(dict(model.named_modules())[name], "log_length", None)
        for key in ("offset", "slope"):
            number = None if holder is None else getattr(holder, key).mean().item()
            assert figures[key] == pytest.approx(number)


def test_a_softmax_layer_of_a_converted_model_is_measured_as_softmax():
    model = tiny_models.build("llama")
    hf_sigmoid.configure(model, "sigmoid", layers=[1])
    found = Health(model, IDS).measure()
    torch.testing.assert_close(found[LAYERS[0]]["row_sum"], torch.ones(4))
    assert found[LAYERS[0]]["offset"] is None and found[LAYERS[1]]["slope"] == -1
    assert (found[LAYERS[1]]["row_sum"] - 1).abs().min() > 1e-3


@pytest.mark.parametrize("function", FUNCTIONS)
def test_packed_documents_are_measured_as_each_alone(function):
    model = build(function)
    alone = Health(model, IDS[:2]).measure()
    positions = torch.arange(12).repeat(2)[None]
    packed = Health(model, IDS[:2].view(1, 24), position_ids=positions).measure()
    for name in LAYERS:
        for key in ("max_logit", "row_sum", "saturated"):
            torch.testing.assert_close(packed[name][key], alone[name][key], **TOLERANCE)


def test_a_measurement_leaves_everything_as_it_was():
    model = build("sigmoid").train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    state, config = torch.get_rng_state(), copy.deepcopy(model.config.to_dict())
    health = Health(model, IDS)

    def unchanged():
        return (
            [module.training for module in model.modules()] == modes
            and torch.equal(torch.get_rng_state(), state)
            and model.config.to_dict() == config
            and model.config._attn_implementation == "sigmoid"
            and STAND_IN not in AttentionInterface._global_mapping
            and all(parameter.grad is None for parameter in model.parameters())
        )

    health.measure()
    assert unchanged()

    def fail(module, args):
        torch.rand(1)
        raise RuntimeError("stop")

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        health.measure()
    assert unchanged()
    hook.remove()
    assert (health.measure()[LAYERS[0]]["mean_change"] == 0).all()  # of the last whole one


def test_a_probe_within_a_recording_is_not_recorded():
    model = build("ssmax")
    with record(model) as recorder:
        Health(model, IDS).measure()
        assert recorder.max_logits() == {}


@pytest.mark.parametrize("wrap", ["peft", "compiled"])
def test_wrapped_models_are_measured_as_bare_ones(wrap):
    expected = Health(build("sigmoid"), IDS).measure()
    if wrap == "peft":
        model = get_peft_model(build("sigmoid"), LoraConfig(r=2, target_modules=["q_proj"]))
    else:
        model = torch.compile(build("sigmoid"), backend="aot_eager")
        with torch.no_grad():
            model(IDS, use_cache=False)
    found = Health(model, IDS).measure()
    assert list(found) == LAYERS
    for name, figures in found.items():
        assert torch.equal(figures["max_logit"], expected[name]["max_logit"])


def test_a_resumed_probe_goes_on_with_the_same_changes():
    model = build("ssmax")
    health = Health(model, IDS)
    health.measure()
    again = Health(model, IDS)
    again.load_state_dict(copy.deepcopy(health.state_dict()))
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(0.9)
    one, other = health.measure(), again.measure()
    for name in LAYERS:
        assert torch.equal(one[name]["mean_change"], other[name]["mean_change"])
        assert one[name]["mean_change"].min() > 0
    with pytest.raises(ValueError, match="a probe with the same token ids"):
        Health(model, IDS + 1).load_state_dict(health.state_dict())


def test_a_summary_is_json_of_four_digits():
    measured = {
        "a": {"max_logit": torch.tensor([1.0, 12.34567]), "mean_change": None,
              "row_sum": torch.tensor([0.5, 1.0]), "saturated": torch.tensor([0.0, 0.1]),
              "offset": -0.123456, "slope": None},
        "b": {"max_logit": torch.tensor([math.inf, 1.0]), "mean_change": torch.tensor([1.0, 2.0]),
              "row_sum": torch.tensor([1.0, 1.0]), "saturated": torch.tensor([1.0, 0.5]),
              "offset": None, "slope": -1.0},
    }  # fmt: skip
    assert json.loads(json.dumps(summary(measured), allow_nan=False)) == {
        "max_logit": [12.35, None], "mean_change": [None, 1.5], "row_sum": [0.75, 1.0],
        "saturated": [0.05, 0.75], "offset": [-0.1235, None], "slope": [None, -1.0],
    }  # fmt: skip


def test_bad_probes_are_named():
    model = build("sigmoid")
    with pytest.raises(ValueError, match=r"token ids \[B, T\], got torch.int64 \[12\]"):
        Health(model, IDS[0])
    with pytest.raises(ValueError, match="expected a model of transformers, got Linear"):
        Health(torch.nn.Linear(2, 2), IDS)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> dict[str, dict]:
    return rows_of(WORKER, tmp_path_factory.mktemp("split"), "monitor")


WAYS = ("ddp", "transformers_fsdp2", "transformers_tp")


@pytest.mark.parametrize("way", releases.marked(WAYS, optim_worker.SINCE["monitor"]))
def test_split_models_have_the_figures_of_whole_ones(two_processes, way):
    found = two_processes[way]
    assert max(found["recorded"], found["figures"], found["state"]) < 1e-5
    assert found["least_change"] > 1e-3  # the step moved logits
