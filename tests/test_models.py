"""Tiny transformers models: what must not change a result does not, for both functions."""

import pytest
import releases
import tiny_models
import torch
from transformers import (
    ModernBertConfig,
    ModernBertModel,
    OPTConfig,
    OPTForCausalLM,
    StaticCache,
)

import hf_sigmoid
from hf_sigmoid import functional, masks, reference, registration
from hf_sigmoid.compat import BATCHES_ANY_FUNCTION, CACHE, recompute_activations

FUNCTIONS = ("sigmoid", "ssmax")
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}  # float32 sums in another order, through two layers

every_function = pytest.mark.parametrize("function", FUNCTIONS)
every_decoder = pytest.mark.parametrize("family", tiny_models.DECODERS)
every_family = pytest.mark.parametrize("family", tiny_models.FAMILIES)


def padded(ids: torch.Tensor, left: int, right: int = 0):
    """Row 0 with padding, row 1 without, cut to the same length; their mask and positions."""
    mask = torch.ones_like(ids)
    mask[0, :left] = 0
    if right:
        mask[0, -right:] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids * mask, "attention_mask": mask, "position_ids": positions}


@every_function
@every_family
def test_model_equals_the_reference(family, function, monkeypatch):
    """The whole model with the plain PyTorch specification in place of the fast path."""
    model, inputs = tiny_models.converted(family, function), tiny_models.inputs(family)
    fast = tiny_models.output(model, **inputs)
    calls = []

    def plain(name):
        def call(*tensors, **options):
            calls.append(name)
            return getattr(reference, name)(*tensors, **options)[0]

        return call

    for name in ("sigmoid_attention", "ssmax_attention"):
        monkeypatch.setattr(functional, name, plain(name))
    torch.testing.assert_close(fast, tiny_models.output(model, **inputs), **TOLERANCE)
    # Encoder, decoder and cross-attention of whisper; two layers of all others.
    assert calls == [f"{function}_attention"] * (6 if family == "whisper" else 2)


@every_function
@every_family
def test_default_row_numbers_are_what_the_design_says(family, function):
    """Told nothing, ssmax is softmax to the last bit, and sigmoid is not softmax."""
    softmax = tiny_models.build(family, attn_implementation="sdpa")
    model = tiny_models.build(family, attn_implementation=function)
    inputs = tiny_models.inputs(family)
    difference = (
        (tiny_models.output(model, **inputs) - tiny_models.output(softmax, **inputs)).abs().max()
    )
    assert difference == 0 if function == "ssmax" else difference > 1e-4


@every_function
@pytest.mark.parametrize("left,right", [(4, 0), (0, 3), (2, 2)], ids=["left", "right", "both"])
@pytest.mark.parametrize("family", [*tiny_models.DECODERS, "bert"])
def test_padding_does_not_change_real_tokens(family, function, left, right):
    model, ids = tiny_models.converted(family, function), tiny_models.tokens()
    batch = padded(ids, left, right)
    if family == "bert":
        # Absolute positions: left padding keeps them only if they are given.
        batch["token_type_ids"] = torch.zeros_like(ids)
    both = tiny_models.output(model, **batch)
    real = slice(left, ids.shape[1] - right)
    alone = tiny_models.output(model, input_ids=ids[:1, real])
    torch.testing.assert_close(both[:1, real], alone, **TOLERANCE)
    torch.testing.assert_close(both[1:], tiny_models.output(model, input_ids=ids[1:]), **TOLERANCE)


@every_function
def test_padding_does_not_change_whispers_real_tokens(function):
    """Both attentions of the decoder, the second of which sees the encoder's keys."""
    model, batch = tiny_models.converted("whisper", function), tiny_models.inputs("whisper")
    mask = torch.ones_like(batch["decoder_input_ids"])
    mask[0, 8:] = 0
    both = tiny_models.output(model, **batch, decoder_attention_mask=mask)
    alone = tiny_models.output(
        model,
        input_features=batch["input_features"][:1],
        decoder_input_ids=batch["decoder_input_ids"][:1, :8],
    )
    torch.testing.assert_close(both[:1, :8], alone, **TOLERANCE)
    torch.testing.assert_close(both[1:], tiny_models.output(model, **batch)[1:], **TOLERANCE)


@every_function
@every_decoder
def test_packed_documents_equal_separate_ones(family, function):
    model, ids = tiny_models.converted(family, function), tiny_models.tokens(1, 20)
    lengths = (9, 4, 7)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = tiny_models.output(model, input_ids=ids, position_ids=positions, use_cache=False)
    alone = [tiny_models.output(model, input_ids=part) for part in ids.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), **TOLERANCE)


@every_function
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_packed_by_cumulative_lengths_equals_separate(family, use_cache, function):
    """What a flattening collator hands over: right also where the mask does not know of documents.

    opt never gives its positions to the mask, and nobody looks at them when there is a cache.
    """
    if family == "opt":
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "vocab_size": 99}
        config = OPTConfig(**sizes, num_attention_heads=4, word_embed_proj_dim=32)
        model = OPTForCausalLM._from_config(config, attn_implementation=function).eval()
    else:
        model = tiny_models.converted(family, function)
    ids = tiny_models.tokens(1, 20)
    lengths = (9, 4, 7)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = tiny_models.output(
        model,
        input_ids=ids,
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        cu_seq_lens_q=ends,
        cu_seq_lens_k=ends,
        max_length_q=9,
        max_length_k=9,
        use_cache=use_cache,
    )
    alone = [tiny_models.output(model, input_ids=part) for part in ids.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), **TOLERANCE)


@every_function
@every_decoder
@pytest.mark.parametrize("left", [0, 3], ids=["full", "left_padded"])
def test_cached_decoding_equals_recomputing(family, function, left):
    model = tiny_models.converted(family, function)
    batch = padded(tiny_models.tokens(2, 10), left)
    del batch["position_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    cached = model.generate(**batch, **options)
    again = model.generate(**batch, **options, use_cache=False)
    assert torch.equal(cached.sequences, again.sequences)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(again.logits), **TOLERANCE)


@every_function
@every_decoder
def test_static_cache_equals_dynamic(family, function):
    model, ids = tiny_models.converted(family, function), tiny_models.tokens(2, 10)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    dynamic = model.generate(ids, **options)
    # Longer than the text, so that its tail stays unused and must not be counted.
    cache = StaticCache(config=model.config, max_cache_len=40)
    static = model.generate(ids, **options, **{CACHE: cache})
    assert torch.equal(dynamic.sequences, static.sequences)
    torch.testing.assert_close(torch.stack(dynamic.logits), torch.stack(static.logits), **TOLERANCE)


@every_function
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_whisper_decodes_with_caches_as_without(function, static):
    model, batch = tiny_models.converted("whisper", function), tiny_models.inputs("whisper")
    full = tiny_models.output(model, **batch)
    memory = model.model.encoder(batch["input_features"])
    cache, steps = None, []
    if static:
        from transformers import EncoderDecoderCache

        cache = EncoderDecoderCache(
            StaticCache(config=model.config, max_cache_len=30),
            StaticCache(config=model.config, max_cache_len=memory.last_hidden_state.shape[1]),
        )
    for token in batch["decoder_input_ids"].split(1, 1):
        with torch.no_grad():
            result = model(
                encoder_outputs=memory,
                decoder_input_ids=token,
                use_cache=True,
                **{CACHE: cache},
            )
        cache = getattr(result, CACHE)
        steps.append(result.logits)
    torch.testing.assert_close(torch.cat(steps, 1), full, **TOLERANCE)


@every_function
@pytest.mark.parametrize("family", [*tiny_models.DECODERS, "bert"])
def test_intervals_equal_dense_masks(family, function, monkeypatch):
    """Causal, padded and sliding layers, with transformers' own boolean masks instead."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    model, batch = tiny_models.converted(family, function), padded(tiny_models.tokens(), 3)
    intervals = tiny_models.output(model, **batch)
    seen = []

    def dense(*args, **kwargs):
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        seen.append(sdpa_mask(*args, **{**kwargs, **skips}))
        return seen[-1]

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, function, dense)
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(
        intervals[real], tiny_models.output(model, **batch)[real], **TOLERANCE
    )
    assert all(mask.dtype == torch.bool for mask in seen)
    assert len(seen) == (2 if family == "gemma3" else 1)


@every_function
def test_a_users_own_mask_is_honoured(function):
    """Bool or additive, [B, 1, M, N], with holes."""
    model, ids = tiny_models.converted("llama", function), tiny_models.tokens()
    causal = torch.ones(12, 12).tril().bool()
    mask = (causal & (torch.rand(2, 1, 12, 12) < 0.6)) | torch.eye(12).bool()
    as_bool = tiny_models.output(model, input_ids=ids, attention_mask=mask)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    as_float = tiny_models.output(model, input_ids=ids, attention_mask=additive)
    torch.testing.assert_close(as_bool, as_float, **TOLERANCE)
    assert (as_bool - tiny_models.output(model, input_ids=ids)).abs().max() > 1e-3


@every_function
@every_family
def test_returned_weights_reproduce_the_output(family, function):
    """`output_attentions=True`, checked on the attention modules' own inputs."""
    model, inputs = tiny_models.converted(family, function), tiny_models.inputs(family)
    plain = tiny_models.output(model, **inputs)
    with torch.no_grad():
        result = model(**inputs, output_attentions=True)
    logits = result.logits if hasattr(result, "logits") else result.last_hidden_state
    torch.testing.assert_close(logits, plain, **TOLERANCE)
    weights = result.encoder_attentions if family == "whisper" else result.attentions
    assert len(weights) == 2 and all(
        weight.dim() == 4 and weight.shape[1] == 4 for weight in weights
    )
    total = weights[0].sum(-1)
    if function == "ssmax":
        torch.testing.assert_close(total, torch.ones_like(total), **TOLERANCE)
    else:
        assert (total - 1).abs().max() > 1e-2


@every_function
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_gradients_reach_every_parameter(family, function):
    model, inputs = tiny_models.converted(family, function), tiny_models.inputs(family)
    model.train()
    result = model(**inputs)
    (
        result.logits if hasattr(result, "logits") else result.last_hidden_state
    ).square().sum().backward()
    for name, parameter in model.named_parameters():
        if "pooler" not in name:
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    for name, parameter in model.named_parameters():
        if "log_length" in name:
            assert parameter.grad.abs().max() > 0, name


@every_function
def test_gradient_checkpointing_changes_no_gradient(function):
    gradients = []
    for checkpointing in (False, True):
        model, ids = tiny_models.converted("llama", function), tiny_models.tokens()
        model.train()
        if checkpointing:
            recompute_activations(model)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, **TOLERANCE)


@every_function
def test_autocast_mixed_dtypes_run_in_the_autocast_dtype(function):
    """RoPE hands over float32 q and k with a bfloat16 v."""
    model, ids = tiny_models.converted("llama", function), tiny_models.tokens()
    exact = tiny_models.output(model, input_ids=ids)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = tiny_models.output(model, input_ids=ids)
    assert (mixed.float() - exact).abs().max() < 0.1 * exact.abs().max()


@every_function
def test_model_compiles_to_one_graph(function):
    model, ids = tiny_models.converted("llama", function), tiny_models.tokens()
    eager = tiny_models.output(model, input_ids=ids)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(tiny_models.output(compiled, input_ids=ids), eager, **TOLERANCE)


@every_function
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_one_graph_serves_every_length(family, function, padded):
    """Scalings and soft caps are symbols in it, too."""
    model = tiny_models.converted(family, function)
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for rows, length in ((2, 12), (3, 17), (2, 9)):
        given = {"input_ids": tiny_models.tokens(rows, length), "use_cache": False}
        if padded:
            given["attention_mask"] = torch.ones_like(given["input_ids"])
            given["attention_mask"][0, :3] = 0
        wanted, found = (tiny_models.output(each, **given)[1:] for each in (model, compiled))
        torch.testing.assert_close(found, wanted, **TOLERANCE)
    assert len(graphs) <= 2  # one for sizes seen once, one for any


@every_function
def test_an_exported_encoder_with_a_window_takes_lengths_on_both_sides_of_it(function):
    releases.skip_if_refused(ModernBertModel)
    config = ModernBertConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, local_attention=16, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    model = ModernBertModel._from_config(config, attn_implementation=function).eval()
    length = torch.export.Dim("length", min=4, max=60)
    given = {"input_ids": tiny_models.tokens(2, 17)}
    exported = torch.export.export(model, (), given, dynamic_shapes={"input_ids": {1: length}})
    for tokens in (5, 29):
        given = {"input_ids": tiny_models.tokens(2, tokens)}
        found = exported.module()(**given).last_hidden_state
        torch.testing.assert_close(found, tiny_models.output(model, **given), **TOLERANCE)


@every_function
@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_exported_model_takes_other_lengths(family, function, strict):
    if not strict:
        releases.skip_unless_exported(function)
    model = tiny_models.converted(family, function)
    length = torch.export.Dim("length", min=2, max=60)
    given = {"input_ids": tiny_models.tokens(2, 12), "use_cache": False}
    dynamic = {"input_ids": {1: length}, "use_cache": None}
    exported = torch.export.export(model, (), given, dynamic_shapes=dynamic, strict=strict)
    given["input_ids"] = tiny_models.tokens(2, 29)
    found = exported.module()(**given).logits
    torch.testing.assert_close(found, tiny_models.output(model, **given), **TOLERANCE)


@every_function
def test_continuous_batching_equals_generate_or_is_refused(function):
    from transformers import GenerationConfig

    model = tiny_models.converted("llama", function)
    prompts = [[5, 6, 7, 8], [9, 10, 11], [20, 21]]
    config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    given = {"inputs": prompts, "generation_config": config, "progress_bar": False}
    if not BATCHES_ANY_FUNCTION:
        with pytest.raises(hf_sigmoid.Unsupported, match=rf"continuous batching .* {function}"):
            model.generate_batch(**given)
        return
    batched = model.generate_batch(**given)
    for result, prompt in zip(batched.values(), prompts, strict=True):
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        alone = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert result.generated_tokens == alone.tolist()


def test_layers_that_stay_softmax_are_softmax():
    softmax = tiny_models.build("llama")
    model = tiny_models.build("llama")
    ids = tiny_models.tokens()
    hf_sigmoid.configure(model, "sigmoid", layers=[1])
    hidden = []
    for each in (softmax, model):
        with torch.no_grad():
            hidden.append(each(input_ids=ids, output_hidden_states=True).hidden_states)
    assert torch.equal(hidden[0][1], hidden[1][1]) and not torch.equal(hidden[0][2], hidden[1][2])


@every_function
@pytest.mark.parametrize(
    "name",
    [
        "BigBirdPegasusForCausalLM",
        "NllbMoeForConditionalGeneration",
        "BartForConditionalGeneration",
    ],
)
def test_decoders_that_call_themselves_not_causal_see_no_future(function, name):
    """Their modules' `is_causal` is False: transformers runs the first two in eager mode."""
    import transformers

    sizes = {
        "vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "max_position_embeddings": 64, "num_experts": 2,
        "decoder_sparse_step": 0, "encoder_sparse_step": 0,
        "is_encoder_decoder": "Causal" not in name,
    }  # fmt: skip
    cls = getattr(transformers, name)
    config = cls.config_class(**sizes)
    results = {}
    for implementation in ("eager", function):
        torch.manual_seed(0)
        model = cls._from_config(config, attn_implementation=implementation).eval()
        ids = tiny_models.tokens()
        changed = ids.clone()
        changed[:, -1] = 50
        fixed = {} if "Causal" in name else {"input_ids": ids}
        pair = [
            tiny_models.output(model, **{**fixed, f"{'decoder_' * bool(fixed)}input_ids": each})
            for each in (ids, changed)
        ]
        assert torch.equal(pair[0][:, :-1], pair[1][:, :-1]), implementation
        results[implementation] = pair[0]
    if function == "ssmax":
        torch.testing.assert_close(results["ssmax"], results["eager"], **TOLERANCE)


@every_function
@pytest.mark.parametrize("form", ["none", "intervals", "bool", "additive"])
def test_sparse_indices_narrow_every_form_of_mask(function, form):
    """What DeepSeek's indexer selects: keys that are selected and visible, and n counts both."""
    module = torch.nn.Module()
    module.is_causal = True
    q, k, v = torch.randn(3, 2, 2, 6, 4)
    indices = torch.stack([torch.randperm(6)[:3] for _ in range(12)]).view(2, 6, 3)
    causal = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    intervals = torch.stack([torch.zeros(6), torch.arange(1, 7)], -1).int().expand(2, 1, 6, 2)
    mask = {
        "none": None, "intervals": intervals, "bool": causal,
        "additive": torch.zeros(2, 1, 6, 6).masked_fill(~causal, torch.finfo(torch.float32).min),
    }[form]  # fmt: skip
    selected = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    for row in range(2):
        for query in range(6):
            selected[row, 0, query, indices[row, query]] = True
    given, _ = registration.attention(function, module, q, k, v, mask, indices=indices)
    dense, _ = registration.attention(function, module, q, k, v, selected & causal)
    torch.testing.assert_close(given, dense, **TOLERANCE)


@every_function
def test_what_cannot_be_honoured_is_refused_by_name(function):
    module = torch.nn.Module()
    module.is_causal = True
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(hf_sigmoid.Unsupported, match="`block_indices`"):
        registration.attention(function, module, q, q, q, None, block_indices=torch.zeros(1))
    sinks = torch.zeros(2)
    if function == "sigmoid":
        with pytest.raises(ValueError, match="sinks"):
            registration.attention(function, module, q, q, q, None, s_aux=sinks)
    else:
        output, _ = registration.attention(function, module, q, q, q, None, s_aux=sinks)
        expected, _ = reference.ssmax_attention(q, q, q, is_causal=True, sinks=sinks)
        torch.testing.assert_close(output, expected.transpose(1, 2))


@every_function
def test_position_bias_and_softcap_are_honoured(function):
    module = torch.nn.Module()
    q, bias = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 5)
    mask = masks.interval_mask(1, 5, 5, allow_is_causal_skip=False)
    call = getattr(reference, f"{function}_attention")
    row = (
        {"bias": -torch.log(torch.arange(1.0, 6.0))}
        if function == "sigmoid"
        else {"multiplier": 1.0}
    )
    expected, _ = call(q, q, q, is_causal=True, logit_bias=bias, softcap=3.0, **row)
    output, _ = registration.attention(
        function, module, q, q, q, mask, position_bias=bias, softcap=3.0
    )
    torch.testing.assert_close(output, expected.transpose(1, 2))
