"""Sequences split over two and four processes (gloo, CPU) compute what one process computes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import context_worker
import interpreter
import pytest
import releases
import tiny_models
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_sigmoid
from hf_sigmoid import functional, parameters
from hf_sigmoid.context_parallel import context_parallel, gather, split
from hf_sigmoid.context_parallel import layout as ours

interpreter.install()

WORKER = Path(context_worker.__file__)
SAME = [
    pytest.param(
        size, name, marks=releases.marks(context_worker.since(name), f"a valid config for {name}")
    )
    for size in (2, 4)
    for name in context_worker.cases(size)
    if name not in ("bfloat16_gather", "different_rows") and "local_lengths" not in name
]


@pytest.fixture(scope="module")
def ran() -> dict[int, dict[str, dict]]:
    """What the cases found, by the number of processes and by name."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    found = {}
    for size in (2, 4):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size),
             "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", WORKER],
            env=environment, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-5000:]
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        found[size] = {row["case"]: row for row in rows}
    return found


@pytest.mark.parametrize(("size", "name"), SAME)
def test_a_split_sequence_gives_the_logits_and_gradients_of_one_process(ran, size, name):
    found = ran[size][name]
    # Sums of some hundred float32 numbers in another order; per-query terms are always float32.
    tolerance = 1e-12 if "float64" in name else 1e-5
    assert found["logits"] < tolerance and found["gradients"] < tolerance
    assert found["holders"] < 1e-5
    assert found["attended"] > 1e-3  # the smallest of the largest gradients: all attention matters


@pytest.mark.parametrize("function", ["sigmoid", "ssmax"])
def test_counting_local_keys_only_would_be_seen(ran, function):
    found = ran[2][f"local_lengths-{function}"]
    assert found["logits"] > 1e-3 and found["gradients"] > 1e-3


@pytest.mark.parametrize("size", [2, 4])
def test_processes_with_different_rows_all_refuse(ran, size):
    assert "different position_ids" in ran[size]["different_rows"]["refused"]


def test_gradients_of_gathered_keys_are_summed_over_the_processes(ran):
    assert ran[2]["bfloat16_gather"]["values"] and ran[2]["bfloat16_gather"]["gradient"]


# One process that is a group of its own: what is refused, and what is left behind.


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5], [*range(10)]])
IDS = tiny_models.tokens(2, 10)


def call(model, **kwargs):
    given = {"input_ids": IDS, "position_ids": POSITIONS, "use_cache": False, **kwargs}
    return model(**{name: value for name, value in given.items() if value is not None}).logits


def llama(**options) -> LlamaForCausalLM:
    config = LlamaConfig(**{**tiny_models._GROUPED, **options})
    return AutoModelForCausalLM.from_config(config, attn_implementation="ssmax").eval()


def traces(model) -> list:
    """What an open context leaves: attributes of modules, hooks, an entry in the list."""
    attributes = [each for each in model.modules() if hasattr(each, ours.LAYOUT)]
    known = {name for name, _ in parameters.holders(model)}  # these have hooks of their own
    hooks = [
        name
        for name, each in model.named_modules()
        if each._forward_pre_hooks and name not in known
    ]
    return [*attributes, *hooks, *ours.OPEN]


@pytest.mark.parametrize("size", [3, 4])
def test_tokens_that_do_not_divide_are_refused(monkeypatch, size):
    monkeypatch.setattr(gather, "place", lambda group: (0, size))
    if size == 3:
        assert split(torch.zeros(2, 9, 5)).shape == (2, 3, 5)
        assert split(torch.zeros(9, 2), dim=0).shape == (3, 2)
    with pytest.raises(ValueError, match=f"got 10 tokens .*and {size} processes"):
        split(torch.zeros(2, 10))


def test_parts_are_consecutive_and_in_order(monkeypatch):
    whole, parts = torch.arange(12).view(1, 12), []
    for rank in range(4):
        monkeypatch.setattr(gather, "place", lambda group, rank=rank: (rank, 4))
        parts.append(split(whole))
    assert torch.equal(torch.cat(parts, 1), whole)


def test_intervals_begin_where_transformers_sees_a_document():
    positions = torch.tensor([[7, 8, 0, 1, 1, 2], [0, 1, 2, 3, 4, 5]])
    lo, hi = ours.intervals(positions).unbind(-1)
    assert lo.tolist() == [[0, 0, 2, 2, 4, 4], [0] * 6]
    assert hi.tolist() == [[1, 2, 3, 4, 5, 6]] * 2


@pytest.mark.parametrize("function", ["sigmoid", "ssmax"])
@pytest.mark.parametrize("rank", [0, 1])
def test_kernels_take_a_part_of_the_queries_and_all_keys(function, rank):
    """As the gather lays them out: tokens first, and rows that end before the last key."""
    B, H, G, T, D = 2, 4, 2, 32, 8
    rows = slice(16 * rank, 16 * rank + 16)
    visible = ours.intervals(context_worker.PACKED.new_tensor([[*range(7), *range(25)],
                                                                [*range(32)]]))  # fmt: skip
    visible = visible[:, rows].to(torch.int32)
    drawn = [torch.randn(B, H, 16, D), torch.randn(T, B, G, D).permute(1, 2, 0, 3),
             torch.randn(T, B, G, D).permute(1, 2, 0, 3)]  # fmt: skip
    log_n = (visible[..., 1] - visible[..., 0]).float().log().unsqueeze(1)
    options = {"bias": -log_n} if function == "sigmoid" else {"multiplier": 0.3 * log_n}
    verb, found = getattr(functional, f"{function}_attention"), []
    for backend in ("triton", "reference"):
        inputs = [each.clone().requires_grad_() for each in drawn]
        output = verb(*inputs, visible=visible, backend=backend, **options)
        gradients = torch.autograd.grad(output.square().sum(), inputs)
        found.append([output, *gradients])
    for given, expected in zip(*found, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", ["sigmoid", "ssmax"])
def test_a_group_of_one_changes_nothing_and_nothing_is_left(group, function):
    model = tiny_models.converted("llama", function)
    with torch.no_grad():
        before = call(model)
        with context_parallel(model, group, POSITIONS):
            inside = call(model)
            assert len(traces(model)) > 0
        torch.testing.assert_close(inside, before, rtol=1e-5, atol=1e-5)
        assert torch.equal(call(model), before)
    assert traces(model) == []


def test_a_context_closes_after_an_error(group):
    model = llama()
    with pytest.raises(RuntimeError, match="mine"), context_parallel(model, group, POSITIONS):
        raise RuntimeError("mine")
    assert traces(model) == []
    with pytest.raises(ValueError, match="int \\[B, T\\]"), context_parallel(model, group, IDS[0]):
        pass
    assert traces(model) == []


def test_other_models_are_left_alone_inside(group):
    model, teacher, converted = llama(), tiny_models.build("llama"), llama()
    with torch.no_grad():
        before = call(teacher), call(converted)
        with context_parallel(model, group, POSITIONS):
            assert torch.equal(call(teacher), before[0])
            assert torch.equal(call(converted), before[1])


def test_two_models_can_be_in_contexts_at_once_and_one_only_once(group):
    first, second = llama(), llama()
    with context_parallel(first, group, POSITIONS), context_parallel(second, group, POSITIONS[:1]):
        call(first)
        call(second, position_ids=POSITIONS[:1])
        with (
            pytest.raises(ValueError, match="in a context_parallel already"),
            context_parallel(first, group, POSITIONS),
        ):
            pass
        call(first)
    assert traces(first) == traces(second) == []


def test_a_model_that_shares_a_config_is_not_taken_along(group):
    config = LlamaConfig(**tiny_models._GROUPED, attn_implementation="ssmax")
    model, other = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    with (
        context_parallel(model, group, POSITIONS),
        pytest.raises(hf_sigmoid.Unsupported, match="that it is not in"),
    ):
        call(other)


def test_a_mask_that_lost_its_context_is_refused_when_repeated(group):
    """As where a checkpointed layer gets it as a positional argument."""
    module = llama().model.layers[0].self_attn
    mask = torch.zeros(2, 1, 10, 2, dtype=torch.int64)
    with pytest.raises(hf_sigmoid.Unsupported, match="closed before the backward pass"):
        ours.layout_of(module, mask)


PADDED = torch.ones_like(IDS)
ARGUMENTS = {
    "padding": ({"attention_mask": PADDED}, "`attention_mask`"),
    "mask": ({"attention_mask": torch.ones(2, 1, 10, 10, dtype=torch.bool)}, "`attention_mask`"),
    "cache": ({"use_cache": True}, "use_cache=False"),
    "cache_by_default": ({"use_cache": None}, "use_cache=False"),
    "labels": ({"labels": IDS}, "`labels`"),
    "no_positions": ({"position_ids": None}, "must be given position_ids"),
    "local_positions": ({"position_ids": torch.arange(10)[None]}, "not part 0 of the 1"),
    "other_length": ({"input_ids": IDS[:, :8], "position_ids": POSITIONS[:, :8]}, "10 tokens"),
    "other_rows": ({"input_ids": IDS[:1], "position_ids": POSITIONS[1:]}, "not part 0|2 rows"),
    "more_rows": (
        {"input_ids": IDS.repeat(2, 1), "position_ids": POSITIONS.repeat(2, 1)},
        r"position_ids \[2, 10\]",
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_calls_that_do_not_fit_are_refused(group, case):
    given, message = ARGUMENTS[case]
    model = llama()
    with (
        context_parallel(model, group, POSITIONS),
        pytest.raises(ValueError, match=message) as raised,
    ):
        call(model, **given)
    assert "Llama" in str(raised.value) or "context_parallel" in str(raised.value)


@pytest.mark.parametrize("argument", ours.LOCAL)
def test_arguments_of_attention_about_local_positions_are_refused(group, argument):
    model = llama()
    module = model.model.layers[0].self_attn
    with context_parallel(model, group, POSITIONS):
        layout = getattr(module, ours.LAYOUT)
        given = {argument: torch.zeros(1)}
        with pytest.raises(hf_sigmoid.Unsupported, match=f"LlamaAttention passes `{argument}`"):
            layout.whole("ssmax", module, None, None, None, None, given)


@pytest.mark.parametrize("mask", [None, torch.zeros(2, 1, 10, 2, dtype=torch.int32)])
def test_a_mask_that_is_not_the_contexts_is_refused(group, mask):
    model = llama()
    module = model.model.layers[0].self_attn
    q = torch.zeros(2, 4, 10, 8)
    with (
        context_parallel(model, group, POSITIONS),
        pytest.raises(hf_sigmoid.Unsupported, match=r"LlamaAttention passes .*mask"),
    ):
        attend(module, q, q, q, mask)


def attend(module, *tensors):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS["ssmax"](module, *tensors, scaling=1.0)


def test_keys_of_another_length_are_refused(group):
    model = llama()
    module = model.model.layers[0].self_attn
    with context_parallel(model, group, POSITIONS):
        layout = getattr(module, ours.LAYOUT)
        mask = layout.mask(2, 10, 10, 0, 0, causal(), None)
        q, k = torch.zeros(2, 4, 10, 8), torch.zeros(2, 4, 12, 8)
        with pytest.raises(hf_sigmoid.Unsupported, match="caches and cross attention"):
            attend(module, q, k, k, mask)


def causal():
    from transformers.masking_utils import causal_mask_function

    return causal_mask_function


def test_mask_functions_are_taken_apart_or_refused():
    from transformers import masking_utils as theirs

    remap = getattr(theirs, "remap_positions_for_packed_sequence", lambda mask, _: mask)  # 5.23
    packed = theirs.and_masks(
        remap(theirs.sliding_window_causal_mask_function(5), POSITIONS),
        theirs.packed_sequence_mask_function(POSITIONS),
    )
    assert ours.window_of(causal()) is None and ours.window_of(packed) == 5
    for refused, message in {
        theirs.bidirectional_mask_function: "bidirectional_mask_function",
        theirs.chunked_causal_mask_function(4, torch.zeros(2)): "chunked_overlay",
        theirs.or_masks(causal(), causal()): "or_masks",
        theirs.and_masks(causal(), lambda *index: True): "test_context_parallel",
        theirs.sliding_window_overlay(4): "not causal",
    }.items():
        with pytest.raises(hf_sigmoid.Unsupported, match=message):
            ours.window_of(refused)


def sdpa():
    return tiny_models.build("llama")


def encoder():
    return tiny_models.build("bert", attn_implementation="ssmax")


def encoder_decoder():
    return tiny_models.build("whisper", attn_implementation="ssmax")


def convolution():
    model = llama()
    model.model.layers[0].mlp.short = torch.nn.Conv1d(4, 4, 3)
    return model


def mixer():
    model = llama()
    model.model.layers[0].mixer = type("TinyMambaMixer", (torch.nn.Module,), {})()
    return model


def private():
    model = llama()
    model.model.layers[0].pool = torch.nn.MultiheadAttention(8, 2)
    return model


def layer_types():
    model = llama()
    model.config.layer_types = ["chunked_attention", "full_attention"]
    return model


def dynamic_rope():
    return llama(
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    )


MODELS = {
    sdpa: "self_attn .LlamaAttention. runs 'sdpa'",
    encoder_decoder: "Conv1d|position_ids|is_encoder_decoder",
    convolution: "layers.0.mlp.short .Conv1d. mixes tokens",
    mixer: "layers.0.mixer .TinyMambaMixer. mixes tokens",
    private: "layers.0.pool .MultiheadAttention. mixes tokens",
    layer_types: "LlamaConfig has layers of types chunked_attention",
    dynamic_rope: "LlamaConfig has rope_type='dynamic'",
}


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_models_that_would_compute_something_else_are_refused(group, build):
    model = build()
    with (
        pytest.raises(hf_sigmoid.Unsupported, match=MODELS[build]),
        context_parallel(model, group, POSITIONS),
    ):
        pass
    assert traces(model) == []


def test_attention_that_is_not_causal_is_refused_when_called(group):
    model = encoder()
    with (
        pytest.raises(hf_sigmoid.Unsupported, match="bidirectional_mask_function"),
        context_parallel(model, group, POSITIONS),
    ):
        model(input_ids=IDS, position_ids=POSITIONS, use_cache=False)


def test_a_module_without_attention_is_refused(group):
    with (
        pytest.raises(hf_sigmoid.Unsupported, match="Linear has no attention"),
        context_parallel(torch.nn.Linear(2, 2), group, POSITIONS),
    ):
        pass
