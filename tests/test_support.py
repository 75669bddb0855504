"""Every architecture: what runs is right, what cannot is refused by name, nothing is ignored."""

import ast
import inspect
import json
from pathlib import Path

import pytest
import releases
import torch
import transformers
from safetensors.torch import save_file
from support import catalogue, checks, samples, tiny
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import hf_sigmoid
from hf_sigmoid import attention, masks, registration
from hf_sigmoid.parameters import attention_modules

FUNCTIONS = ("sigmoid", "ssmax")
ROWS = json.loads((Path(__file__).parents[1] / "docs" / "support.json").read_text())
KNOWN = {(row["model_type"], row["backend"]): row for row in ROWS}
# One of each kind: what differs is in the comment.
REPRESENTATIVE = (
    "llama",
    "gemma2",  # softcap, sliding layers
    "gemma3",  # text and images, bidirectional blocks
    "gpt_oss",  # sinks
    "llama4_text",  # chunks
    "deepseek_v3",  # MLA
    "deepseek_v32",  # sparse indices
    "qwen3_next",  # linear and full layers
    "qwen2_5_vl_vision",  # packed images
    "opt",
    "gpt2",
    "bert",
    "modernbert",
    "t5",  # position bias
    "bart",
    "whisper",
    "wav2vec2",
    "vit",
    "siglip_vision_model",
    "detr",
)

every_function = pytest.mark.parametrize("function", FUNCTIONS)

# Until it is on the attention interface another line says so, before anything is looked at.
LONGT5 = "LongT5LocalAttention computes softmax"
if not releases.IS_NEWEST:
    LONGT5 += "|does not go through"


@pytest.fixture(autouse=True)
def _is_there(request):
    """A test of a model type runs where there is one."""
    if hasattr(request.node, "callspec") and "model_type" in request.node.callspec.params:
        releases.skip_without(request.node.callspec.params["model_type"])


@every_function
@pytest.mark.parametrize("model_type", REPRESENTATIVE)
def test_a_row_that_worked_works(model_type, function):
    """All checks of `make support`, and the verdict that docs/support.json has."""
    releases.skip_without(model_type, catalogue.model_types())
    known = KNOWN[model_type, function]
    row = checks.examine(model_type, function)
    if releases.refuses(catalogue.model_class(model_type)):
        assert row.status == "refused", row
        return
    assert row.status == known["status"], f"{row.reason or row.status}, was {known['status']}"
    worked = {name for name, text in known["checks"].items() if text == "passed"}
    # An older model may do less under its own softmax, too, which the checks have found out.
    enough = ("passed",) if releases.IS_NEWEST else ("passed", "not applicable")
    works = {name for name, text in row.checks.items() if text.startswith(enough)}
    assert worked <= works, {name: row.checks[name] for name in worked - works}


@releases.needs("5.24", "the table")
def test_the_committed_table_is_of_every_model_type_and_has_no_wrong_row():
    types = set(catalogue.model_types())
    for function in FUNCTIONS:
        rows = [row for row in ROWS if row["backend"] == function]
        assert {row["model_type"] for row in rows} == types and len(rows) == len(types)
        count = {status: 0 for status in ("right", "wrong", "refused", "not_built")}
        for row in rows:
            count[row["status"]] += 1
            assert row["reason"] or row["status"] == "right"
            assert "passed" in row["checks"].values() or row["status"] != "right"
        assert count["right"] >= 300 and count["wrong"] == 0 and count["not_built"] <= 25, count


def test_a_wrong_attention_function_is_found_out(monkeypatch):
    """The checks themselves: each fault that they exist for makes its row wrong."""
    right = AttentionInterface._global_mapping["sigmoid"]

    def softmax(module, query, key, value, attention_mask, **kwargs):
        return AttentionInterface._global_mapping["ssmax"](
            module, query, key, value, attention_mask, **kwargs
        )

    def without_mask(module, query, key, value, attention_mask, **kwargs):
        return right(module, query, key, value, None, **kwargs)

    def without_softcap(*args, softcap=None, **kwargs):
        return right(*args, **kwargs)

    def without_bias(*args, position_bias=None, **kwargs):
        return right(*args, **kwargs)

    def later(module, query, key, value, attention_mask, **kwargs):
        """n of a cached step one too small."""
        if query.shape[2] == 1 and masks.is_intervals(attention_mask):
            attention_mask = attention_mask + torch.tensor([1, 0], dtype=torch.int32)
        return right(module, query, key, value, attention_mask, **kwargs)

    faults = {
        "llama": (softmax, "equals_eager"),
        "gemma3_text": (without_mask, "equals_eager"),
        "gemma2": (without_softcap, "equals_eager"),
        "t5": (without_bias, "equals_eager"),
        "qwen3": (later, "generate_dynamic"),
    }
    for model_type, (fault, check) in faults.items():
        if releases.refuses(catalogue.model_class(model_type)):
            continue
        monkeypatch.setitem(AttentionInterface._global_mapping, "sigmoid", fault)
        found = [each for each in checks.CHECKS if each.__name__ == f"check_{check}"]
        row = checks.examine(model_type, "sigmoid", tuple(found))
        assert row.status == "wrong" and check in row.reason, (model_type, row)


# Refusals


@every_function
@pytest.mark.parametrize(
    ("model_type", "sentence"),
    [
        ("bloom", "BloomForCausalLM does not go through"),
        ("deberta-v2", "DebertaV2ForMaskedLM does not go through"),
        ("mamba", "MambaForCausalLM has no attention"),
        ("fnet", "FNetForMaskedLM has no attention"),
        ("git", "GIT_SELF_ATTENTION_CLASSES"),
        ("sam", "SAM_VISION_ATTENTION_CLASSES"),
        ("deepseek_vl_hybrid", "SAM_VISION_ATTENTION_CLASSES"),
        ("longt5", LONGT5),
        ("bigbird_pegasus", r"BigBirdPegasus\w+Attention computes softmax"),
        ("gemma4_audio", "Gemma4AudioAttention computes softmax"),
        ("gemma4_assistant", "gemma4_assistant turns its attention mask around"),
    ],
)
def test_what_would_stay_softmax_is_refused_before_weights_load(
    model_type, sentence, function, tmp_path
):
    """A checkpoint without one weight in it: the refusal comes before any is looked for."""
    config = tiny.tiny(model_type)
    cls = catalogue.model_class(model_type)
    config.save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for build in (
        lambda: cls.from_pretrained(tmp_path, attn_implementation=function),
        lambda: cls._from_config(config, attn_implementation=function),
    ):
        with pytest.raises(hf_sigmoid.Unsupported, match=sentence) as refusal:
            build()
        assert function in str(refusal.value)


def test_a_part_off_the_interface_can_be_left_out_by_name():
    """What the refusal advises."""
    releases.skip_without("gemma4")
    config = tiny.tiny("gemma4")
    cls = catalogue.model_class("gemma4")
    parts = {"text_config": "sigmoid"}
    model = cls._from_config(config, attn_implementation=parts)
    assert model.config.text_config._attn_implementation == "sigmoid"


def built(model_type: str, implementation="eager", **extra):
    return (
        catalogue.model_class(model_type)
        ._from_config(tiny.tiny(model_type, **extra), attn_implementation=implementation)
        .eval()
    )


@every_function
@pytest.mark.parametrize("by", ["name", "configure"])
@pytest.mark.parametrize(
    ("model_type", "sentence"),
    [
        ("bloom", "does not go through"),
        ("mamba", "has no attention"),
        ("git", "GitSelfAttention computes softmax|does not|composed of parts"),
        ("longt5", LONGT5),
        ("bigbird_pegasus", r"BigBirdPegasus\w+Attention computes softmax"),
        ("pegasus_x", "PegasusXGlobalLocalAttention computes softmax"),
        pytest.param(
            "evolla",
            "computes softmax|composed of parts",
            marks=releases.needs("5.13", "an evolla that runs with grouped keys"),
        ),
        pytest.param(
            "chameleon",
            "computes softmax|composed of parts",
            marks=releases.needs("5.5", "a config of chameleon that is valid"),
        ),
    ],
)
def test_a_built_model_is_refused_as_one_to_be_built(model_type, sentence, function, by):
    """At run time, through the outermost class; and the refused model is what it was."""
    model = built(model_type)
    inputs = samples.inputs(model)
    before = checks.run(model, **inputs)
    with pytest.raises(ValueError, match=sentence):
        if by == "name":
            model.set_attn_implementation(function)
        else:
            hf_sigmoid.configure(model, function)
    assert all(torch.equal(a, b) for a, b in zip(before, checks.run(model, **inputs), strict=True))
    for part in model.modules():
        config = getattr(part, "config", None)
        assert getattr(config, "_attn_implementation", None) not in FUNCTIONS
        assert not getattr(config, "hf_sigmoid", None) and not hasattr(part, "log_length")


def test_sinks_are_refused_at_run_time_too():
    model = built("gpt_oss")
    with pytest.raises(hf_sigmoid.Unsupported, match="attention sinks"):
        model.set_attn_implementation("sigmoid")
    with pytest.raises(hf_sigmoid.Unsupported, match="attention sinks"):
        built("gpt_oss", "sigmoid")


def test_layers_without_sinks_are_not_refused():
    releases.skip_without("mimo_v2_flash")
    model = built("mimo_v2_flash")  # sinks in its sliding layers only
    with pytest.raises(hf_sigmoid.Unsupported, match="attention sinks"):
        hf_sigmoid.configure(model, "sigmoid")
    full = model.config.layer_types.index("full_attention")
    hf_sigmoid.configure(model, "sigmoid", layers=[full])
    assert torch.isfinite(checks.first(model, **samples.inputs(model))).all()


@every_function
@pytest.mark.parametrize("model_type", ["detr", "rt_detr", "d_fine"])
def test_parts_without_attention_are_no_reason_to_refuse(model_type, function):
    """Backbones of convolutions, when built and at run time."""
    assert built(model_type, function).config._attn_implementation == function
    model = built(model_type)
    model.set_attn_implementation(function)
    assert model.config._attn_implementation == function


@every_function
def test_a_part_that_does_not_follow_is_refused(function):
    """maskformer gives its backbone a function of its own: softmax, and not on the interface."""
    with pytest.raises(
        hf_sigmoid.Unsupported, match=r"MaskFormerSwin.* would stay softmax|does not"
    ):
        built("maskformer", function)


@every_function
def test_a_refused_config_is_not_poisoned(function):
    config = tiny.tiny("mamba")
    cls = catalogue.model_class("mamba")
    with pytest.raises(hf_sigmoid.Unsupported):
        cls._from_config(config, attn_implementation=function)
    assert not hasattr(config, "hf_sigmoid")
    cls._from_config(config, attn_implementation="eager")


@every_function
def test_own_masks_are_refused_through_a_part_too(function):
    """The part's config is that of another model, which may."""
    releases.skip_without("gemma4_assistant")
    for implementation in (function, {"text_config": function}):
        with pytest.raises(hf_sigmoid.Unsupported, match="gemma4_assistant turns its"):
            built("gemma4_assistant", implementation)
    with pytest.raises(hf_sigmoid.Unsupported, match="gemma4_assistant turns its"):
        built("gemma4_assistant").set_attn_implementation({"text_config": function})


@every_function
def test_a_dict_may_only_name_parts_that_there_are(function):
    """Anything else would be ignored, and softmax run."""
    with pytest.raises(hf_sigmoid.Unsupported, match="'text_config', which LlamaConfig does not"):
        built("llama", {"text_config": function})
    with pytest.raises(hf_sigmoid.Unsupported, match=r"its parts: .*text_config"):
        built("gemma3", {"txt_config": function})
    with pytest.raises(hf_sigmoid.Unsupported, match="'txt_config'"):
        built("gemma3").set_attn_implementation({"txt_config": function})
    model = built("gemma3")
    model.set_attn_implementation({"text_config": function})
    assert model.config.text_config._attn_implementation == function
    assert model.config.vision_config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("model_type", "layers"), [("bamba", "linear"), ("qwen3_next", "linear"), ("llama", "none")]
)
def test_layers_that_would_convert_nothing_are_an_error(model_type, layers):
    """Softmax would run under the name."""
    model = built(model_type)
    with_attention = {module.layer_idx for _, module in attention_modules(model)}
    count = model.config.num_hidden_layers
    chosen = [] if layers == "none" else sorted(set(range(count)) - with_attention)[:1]
    message = "at least one layer" if layers == "none" else "have no attention to convert"
    with pytest.raises(ValueError, match=message):
        hf_sigmoid.configure(model, "sigmoid", layers=chosen)
    assert not hasattr(model.config, "hf_sigmoid")


def test_the_family_of_a_config_is_that_of_its_base_too():
    """Who derives a model from doge needs doge's form of mask."""
    base = type(tiny.tiny("doge"))
    derived = type("MyConfig", (base,), {"__module__": "my.own.module"})()
    assert masks.interval_mask(1, 3, 3, config=derived).dtype == torch.bool


SCALED = {
    "llama4_text": {"attn_temperature_tuning": True},
    "ministral3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                   "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}},
    "mistral4": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                 "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}},
    "inkling_text": {"log_scaling_n_floor": 64},
    "inkling2_text": {"log_scaling_n_floor": 64},
    "inkling2_loop_text": {"log_scaling_n_floor": 64},
    "mistral_large4_text": {},
    "beam": {},
}  # fmt: skip
OFF = {
    "llama4_text": {"attn_temperature_tuning": False},
    "ministral3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "mistral4": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "inkling_text": {"log_scaling_n_floor": None},
}


@pytest.mark.parametrize("model_type", SCALED)
def test_ssmax_refuses_to_scale_twice_and_says_how_to_switch_one_off(model_type):
    from hf_sigmoid import support

    config = tiny.tiny(model_type, **SCALED[model_type])
    with pytest.raises(hf_sigmoid.Unsupported, match="already scales its logits by log length"):
        support.refuse_scaled_twice(config, "ssmax")
    support.refuse_scaled_twice(config, "sigmoid")
    if model_type in OFF:
        support.refuse_scaled_twice(tiny.tiny(model_type, **OFF[model_type]), "ssmax")


def test_qwen_1_scaled_by_remote_code_is_detected():
    from hf_sigmoid import support

    config = transformers.PretrainedConfig(use_logn_attn=True)
    with pytest.raises(hf_sigmoid.Unsupported, match="use_logn_attn"):
        support.refuse_scaled_twice(config, "ssmax")


# Arguments


def keywords_of_the_interface() -> dict[str, set[str]]:
    """Every keyword that a modeling file gives to the function it looked up, and who gives it."""
    found: dict[str, set[str]] = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        source = path.read_text()
        if "ALL_ATTENTION_FUNCTIONS" not in source:
            continue
        for scope in ast.walk(ast.parse(source)):
            if not isinstance(scope, ast.FunctionDef):
                continue
            looked_up = {
                target.id
                for node in ast.walk(scope)
                if isinstance(node, (ast.Assign, ast.AnnAssign))
                and "ALL_ATTENTION_FUNCTIONS" in ast.dump(node)
                for target in getattr(node, "targets", None) or [node.target]
                if isinstance(target, ast.Name)
            }
            for node in ast.walk(scope):
                if isinstance(node, ast.Call) and getattr(node.func, "id", None) in looked_up:
                    for keyword in node.keywords:
                        found.setdefault(keyword.arg or "**", set()).add(path.parent.name)
    return found


def test_every_keyword_that_a_model_passes_is_honoured_refused_or_known_to_say_nothing():
    found = keywords_of_the_interface()
    assert len(found["scaling"]) > (300 if releases.IS_NEWEST else 200)  # the scan sees the calls
    signatures = map(inspect.signature, (attention.attention, attention.read))
    honoured = {name for each in signatures for name in each.parameters} - {"function", "kwargs"}
    known = honoured | set(attention.REFUSED) | set(attention.WITHOUT_MEANING) | {"**"}
    unknown = {name: users for name, users in found.items() if name not in known}
    assert not unknown
    assert not honoured & set(attention.WITHOUT_MEANING)


@every_function
def test_block_indices_are_refused_by_name(function):
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(hf_sigmoid.Unsupported, match="block_indices"):
        registration.attention(
            function, torch.nn.Module(), q, q, q, None, block_indices=torch.zeros(1)
        )


# The number of visible keys


def counted(model, function: str, monkeypatch, **inputs) -> list[torch.Tensor]:
    """n of every row of every attention call of a forward pass, [B, M] each, in order."""
    found = []

    def note(module, query, key, value, attention_mask, **kwargs):
        M, N = query.shape[2], key.shape[2]
        if function == "dense":
            mask = (
                torch.ones(1, 1, M, N, dtype=torch.bool)
                if attention_mask is None
                else attention_mask
            )
            count = mask[..., :N].sum(-1).float()
        else:
            *_, log_n = masks.visible_keys(attention_mask, M, N, False, query.device)
            count = log_n.exp().round()
        found.append(count.expand(query.shape[0], 1, M)[:, 0])
        return value.new_zeros(query.shape[0], M, query.shape[1], value.shape[-1]), None

    monkeypatch.setitem(AttentionInterface._global_mapping, function, note)
    with torch.no_grad():
        model(**inputs)
    return found


def never_none(*args, **kwargs):
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*args, **kwargs)


@every_function
@pytest.mark.parametrize("model_type", ["gemma3_text", "llama4_text", "t5", "whisper", "bart"])
def test_n_is_what_a_dense_mask_counts(model_type, function, monkeypatch):
    """Sliding layers, chunked layers, and cross-attention to padded encoder keys."""
    extra = {"attn_temperature_tuning": False} if model_type == "llama4_text" else {}
    config = tiny.tiny(model_type, **extra)
    cls = catalogue.model_class(model_type)
    releases.skip_if_refused(cls)
    given = None
    counts = {}
    for name in (function, "dense"):
        if name == "dense":
            monkeypatch.setitem(AttentionInterface._global_mapping, "dense", None)
            monkeypatch.setitem(AttentionMaskInterface._global_mapping, "dense", never_none)
        model = cls._from_config(tiny.tiny(model_type, **extra), attn_implementation=name).eval()
        given = samples.inputs(model) if given is None else given
        if "input_ids" in given:
            mask = torch.ones_like(given["input_ids"])
            mask[0, -3:] = 0
            given["attention_mask"] = mask
        counts[name] = counted(model, name, monkeypatch, **given)
        assert len(counts[name]) >= len(attention_modules(model))
    for ours, dense in zip(counts[function], counts["dense"], strict=True):
        assert torch.equal(ours, dense)
    whole = [count[1] for count in counts[function]]  # the row without padding
    rows = torch.arange(1.0, 1 + whole[0].shape[0])
    if model_type == "gemma3_text":
        window = config.sliding_window
        assert any(torch.equal(count, rows.clamp(max=window)) for count in whole)
        assert any(torch.equal(count, rows) for count in whole)
    if model_type == "llama4_text":
        chunk = config.attention_chunk_size
        assert any(torch.equal(count, (rows - 1) % chunk + 1) for count in whole)
    if model_type in ("t5", "bart"):
        padded = [count[0] for count in counts[function]]
        keys = given["input_ids"].shape[1]
        assert any(torch.equal(count, torch.full_like(count, keys - 3.0)) for count in padded)


# Multi-head latent attention


@every_function
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash"])
def test_latent_attention_has_one_row_number_a_query_head(model_type, function):
    """Queries of rope and nope parts, values of another head dim; heads, not latent groups."""
    config = tiny.tiny(model_type, v_head_dim=4)
    hf_sigmoid.configure(config, function, learn=True, query=True)
    model = catalogue.model_class(model_type)._from_config(config, attn_implementation=function)
    seen = []
    original = AttentionInterface._global_mapping[function]

    def note(module, query, key, value, *args, **kwargs):
        seen.append((module, query.shape, value.shape))
        return original(module, query, key, value, *args, **kwargs)

    AttentionInterface._global_mapping[function] = note
    try:
        model(**samples.inputs(model))
    finally:
        AttentionInterface._global_mapping[function] = original
    assert seen
    for module, query, value in seen:
        assert query[-1] == config.qk_nope_head_dim + config.qk_rope_head_dim != value[-1]
        assert module.log_length.offset.shape == (query[1],)
        assert module.log_length.query.shape == (query[1], query[-1])
