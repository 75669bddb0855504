"""Row intervals against transformers' own boolean mask, over every kind of mask it makes."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import masking_utils as mu

from hf_sigmoid import masks

KINDS = (
    "causal",
    "window",
    "chunk",
    "full",
    "two_sided",
    "packed",
    "packed_window",
    "blocks",
    "vmap",
)


@st.composite
def mask_arguments(draw):
    """Arguments of a mask function as transformers gives them."""
    kind = draw(st.sampled_from(KINDS))
    B, M = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    packed = kind.startswith("packed") or kind == "blocks"
    past, tail = (
        (0, 0) if packed else (draw(st.sampled_from([0, 3, 7])), draw(st.sampled_from([0, 4])))
    )
    window = draw(st.integers(2, 5))
    padding = None
    if not packed and draw(st.booleans()):
        padding = torch.ones(B, past + M, dtype=torch.bool)
        for row in range(B):
            padding[row, : draw(st.integers(0, past + M))] = False
            padding[row, past + M - draw(st.integers(0, 2)) :] = False
    causal = mu.causal_mask_function
    sliding = mu.sliding_window_causal_mask_function(window)
    function = {
        "window": sliding,
        "packed_window": sliding,
        "full": mu.bidirectional_mask_function,
    }.get(kind, causal)
    if kind == "chunk":
        function = mu.chunked_causal_mask_function(
            window, torch.tensor([draw(st.integers(0, 2)) for _ in range(B)])
        )
    if kind == "two_sided":
        function = mu.sliding_window_bidirectional_mask_function(window)
    if kind.startswith("packed"):
        lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
        M = sum(lengths)
        positions = torch.cat([torch.arange(length) for length in lengths])[None].expand(B, -1)
        documents = mu.find_packed_sequence_indices(positions)
        if documents is not None:
            if hasattr(mu, "remap_positions_for_packed_sequence"):  # since 5.23
                function = mu.remap_positions_for_packed_sequence(function, positions)
            function = mu.and_masks(function, mu.packed_sequence_mask_function(documents))
    if kind == "blocks":  # may tear: the same block number in two places
        ids = torch.tensor(
            [draw(st.lists(st.integers(-1, 1), min_size=M, max_size=M)) for _ in range(B)]
        )

        def same_block(b, h, q, k, ids=ids):
            return (ids[b, q] == ids[b, k]) & (ids[b, q] >= 0)

        function = mu.or_masks(causal, same_block)
    if kind == "vmap":
        function = mu.and_masks(causal, lambda b, h, q, k: (q + k) % 3 != 0)
    return {
        "batch_size": B, "q_length": M, "kv_length": M + past + tail, "q_offset": past,
        "kv_offset": 0,
        "mask_function": function, "attention_mask": padding, "use_vmap": kind == "vmap",
        "allow_is_causal_skip": False,
    }  # fmt: skip


def dense(mask, N):
    columns = torch.arange(N)
    lo, hi = mask.unsqueeze(-2).unbind(-1)
    return (columns >= lo) & (columns < hi)


@given(arguments=mask_arguments(), elements=st.sampled_from([1, 20, 1 << 20]))
@settings(max_examples=400)
def test_intervals_are_transformers_own_mask(arguments, elements):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(masks.BLOCK_ELEMENTS, "cpu", elements)
        mask = masks.interval_mask(**arguments)
    arguments["allow_is_bidirectional_skip"] = False
    expected = mu.sdpa_mask(**arguments).expand(arguments["batch_size"], -1, -1, -1)
    N = arguments["kv_length"]
    count = expected.sum(-1)
    first = expected.int().argmax(-1)
    last = N - expected.flip(-1).int().argmax(-1)
    contiguous = bool(((last - first == count) | (count == 0)).all())
    assert masks.is_intervals(mask) == contiguous
    assert torch.equal(dense(mask, N) if contiguous else mask.expand_as(expected), expected)
    *_, log_n = masks.visible_keys(mask, arguments["q_length"], N, True, torch.device("cpu"))
    assert torch.equal(log_n.expand(count.shape), count.float().clamp(min=1).log())


@given(
    table=st.integers(1, 2).flatmap(
        lambda B: st.integers(1, 4).flatmap(
            lambda M: st.integers(1, 6).flatmap(
                lambda N: st.lists(st.booleans(), min_size=B * M * N, max_size=B * M * N).map(
                    lambda cells: torch.tensor(cells).view(B, M, N)
                )
            )
        )
    ),
    skip=st.booleans(),
    family=st.sampled_from([None, "doge", "nllb_moe"]),
)
@settings(max_examples=300)
def test_any_mask_at_all_is_expressed_or_takes_the_dense_path(table, skip, family):
    """Random tables, most of them with holes: what a model's attention then sees is the table."""
    B, M, N = table.shape
    config = None
    if family:
        config = type("Config", (), {"__module__": f"transformers.models.{family}.configuration"})()
    mask = masks.interval_mask(
        B, M, N, mask_function=lambda b, h, q, k: table[b, q, k], config=config,
        allow_is_bidirectional_skip=skip and bool(table.all()),
    )  # fmt: skip
    visible, is_causal, bias, log_n = masks.visible_keys(mask, M, N, False, torch.device("cpu"))
    assert not is_causal and (bias is None or not bias.any())
    seen = torch.ones(B, 1, M, N, dtype=torch.bool)
    if visible is not None:
        seen = dense(visible, N) if masks.is_intervals(visible) else visible
    assert torch.equal(seen.expand(B, 1, M, N)[:, 0], table)
    expected = table.sum(-1).float().clamp(min=1).log()
    assert torch.equal(log_n.expand(B, 1, M)[:, 0], expected)


def test_a_mask_is_left_out_only_where_nothing_is_hidden_and_the_model_allows_it():
    full = {"mask_function": mu.bidirectional_mask_function, "allow_is_bidirectional_skip": True}
    assert masks.interval_mask(1, 3, 3, **full) is None
    assert masks.interval_mask(1, 3, 3, **full, attention_mask=torch.ones(1, 3).bool()) is None
    padding = torch.tensor([[True, True, False]])
    assert masks.interval_mask(1, 3, 3, **full, attention_mask=padding) is not None
    assert masks.interval_mask(1, 3, 3, **full, local_size=2) is not None
    # A decoder that its config makes bidirectional: what None means there is "causal".
    decoder = type("Config", (), {"is_causal": False})()
    assert masks.interval_mask(1, 3, 3, **full, config=decoder).tolist() == [[[[0, 3]] * 3]]


def test_a_causal_mask_is_never_none():
    """transformers' own None means causal or not by a flag of the module, and upper-left."""
    assert masks.interval_mask(1, 3, 3).tolist() == [[[[0, 1], [0, 2], [0, 3]]]]
    assert masks.interval_mask(1, 3, 3, attention_mask=torch.ones(1, 3).bool()) is not None
    everything = masks.interval_mask(2, 2, 7, mask_function=mu.bidirectional_mask_function)
    assert everything.tolist() == [[[[0, 7], [0, 7]]]] * 2
    # Keys beyond the end of a padding mask are hidden, though nothing in it is.
    short = masks.interval_mask(
        1,
        1,
        7,
        mask_function=mu.bidirectional_mask_function,
        attention_mask=torch.ones(1, 5).bool(),
    )
    assert short.tolist() == [[[[0, 5]]]]
    # A static cache's prefill, then one of its steps.
    assert masks.interval_mask(1, 5, 8)[0, 0, :, 1].tolist() == [1, 2, 3, 4, 5]
    assert masks.interval_mask(1, 1, 8, q_offset=torch.tensor(3)).tolist() == [[[[0, 4]]]]


def test_an_integer_mask_is_refused():
    with pytest.raises(ValueError, match=r"must be bool or float, got torch.int64"):
        masks.visible_keys(torch.ones(1, 1, 3, 4).long(), 3, 4, True, torch.device("cpu"))


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    extra=st.integers(0, 3),
    window=st.sampled_from([None, 2]),
)
def test_cumulative_lengths_give_the_blocks_of_a_packed_batch(lengths, extra, window):
    total = sum(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    mask = dense(
        masks.packed_intervals(ends, ends, total + extra, total + extra, True, window),
        total + extra,
    )
    rows = torch.arange(total + extra)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    document = torch.cat([document, torch.full((extra,), -1)])
    expected = (document[:, None] == document) & (rows[:, None] >= rows) & (document >= 0)[:, None]
    if window:
        expected &= rows[:, None] - rows < window
    assert torch.equal(mask[0, 0], expected)


@given(
    first=st.integers(0, 2**31),
    form=st.sampled_from(["intervals", "bool", "float"]),
)
def test_narrowing_is_the_intersection(first, form):
    generator = torch.Generator().manual_seed(first)
    M, N = 4, 7
    a, b = (
        torch.randint(0, N + 1, (2, 1, M, 2), generator=generator).sort(-1).values.int()
        for _ in range(2)
    )
    expected = dense(a, N) & dense(b, N)
    mask = {
        "intervals": a,
        "bool": dense(a, N),
        "float": torch.zeros(2, 1, M, N).masked_fill(~dense(a, N), torch.finfo().min),
    }[form]
    visible, *_ = masks.visible_keys(masks.narrow(mask, b, N), M, N, False, torch.device("cpu"))
    assert torch.equal(dense(visible, N) if form == "intervals" else visible, expected)
    assert masks.narrow(None, b, N) is b


def test_compiled_masks_with_holes_are_an_error_and_not_a_wrong_answer():
    compiled = torch.compile(
        lambda padding: masks.interval_mask(1, 4, 4, attention_mask=padding), backend="aot_eager"
    )
    fine = compiled(torch.tensor([[False, True, True, True]]))
    assert fine[0, 0].tolist() == [[0, 0], [1, 2], [1, 3], [1, 4]]
    with pytest.raises(RuntimeError, match="contiguous"):
        compiled(torch.tensor([[True, False, True, True]]))


@pytest.mark.parametrize("hidden", [-10000.0, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whatever_number_hides_a_key_it_is_not_counted(hidden, dtype):
    """Some models write −10000 for the lowest number; bfloat16 makes −9984 of it."""
    mask = torch.tensor([[[[0.0, 1.5, hidden]]]]).to(dtype)
    visible, _, bias, log_n = masks.visible_keys(mask, 1, 3, False, torch.device("cpu"))
    assert visible.tolist() == [[[[True, True, False]]]] and log_n.exp().item() == 2
    assert bias.tolist() == [[[[0.0, 1.5, 0.0]]]]


def test_lengths_by_kind_of_layer_are_those_of_the_layer():
    """Continuous batching gives them all to a layer that takes its keys from another (gemma3n)."""
    from hf_sigmoid import registration

    module = torch.nn.Module()
    module.layer_type = "sliding_attention"
    q = torch.randn(1, 2, 5, 4)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    given = {"full_attention": torch.tensor([0, 1, 5]), "sliding_attention": ends}
    options = {"cu_seq_lens_q": ends, "is_causal": True}
    ours, _ = registration.attention(
        "sigmoid", module, q, q, q, None, cu_seq_lens_k=given, **options
    )
    right, _ = registration.attention(
        "sigmoid", module, q, q, q, None, cu_seq_lens_k=ends, **options
    )
    assert torch.equal(ours, right)
    plain = torch.nn.Module()  # the second layer of a model that has one kind
    plain.config, plain.layer_idx = type("Config", (), {})(), 1
    given["full_attention"] = ends
    ours, _ = registration.attention(
        "sigmoid", plain, q, q, q, None, cu_seq_lens_k=given, **options
    )
    assert torch.equal(ours, right)
    module.layer_type = "chunked_attention"
    with pytest.raises(ValueError, match="continuous batching is not supported"):
        registration.attention("sigmoid", module, q, q, q, None, cu_seq_lens_k=given, **options)


def test_no_mask_and_no_flag_hides_nothing():
    """mllama's cross-attention: its eager function hides no key either."""
    from hf_sigmoid import reference, registration

    q, k, v = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    ours, _ = registration.attention("ssmax", torch.nn.Module(), q, k, v, None)
    right, _ = reference.ssmax_attention(q, k, v)
    torch.testing.assert_close(ours, right.transpose(1, 2))


def test_log_n_is_made_once_for_layers_that_share_intervals_and_anew_when_they_change():
    mask = torch.tensor([[[[0, 3], [1, 5]]]], dtype=torch.int32)

    def log_n():
        return masks.visible_keys(mask, 2, 5, True, torch.device("cpu"))[-1]

    first = log_n()
    assert log_n() is first
    mask[0, 0, 0, 1] = 1
    torch.testing.assert_close(log_n().exp(), torch.tensor([[[1.0, 4.0]]]))
    with torch.inference_mode():  # its tensors do not tell that they were written to
        mask = mask.clone()
        log_n()
        mask[0, 0, 0, 1] = 2
        torch.testing.assert_close(log_n().exp(), torch.tensor([[[2.0, 4.0]]]))
