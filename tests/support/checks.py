"""What is checked of one tiny model under one function, each against the model's own softmax.

A check compares a model with itself (padded with unpadded, cached with recomputed, …) or with an
oracle, and returns nothing or raises. Where it fails, the same check of the same model with its own
softmax decides: if that fails too, the model cannot do it, and the check is not applicable.
"""

import copy
import inspect
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from unittest import mock

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache

import hf_sigmoid
from hf_sigmoid import functional, reference
from hf_sigmoid.compat import BATCHES_ANY_FUNCTION, RELEASE
from hf_sigmoid.configuration import sub_configs
from hf_sigmoid.parameters import attention_modules, holders
from hf_sigmoid.support import Unsupported
from support import catalogue, oracle, samples, tiny

# float32 through a few layers, relative to the largest number of a tensor.
TOLERANCE = 2e-4
SECONDS = 60  # a check that takes longer is a failure
NEW_TOKENS = 5
OTHER_TOKENS = 8  # inputs on which the model's own softmax is tried where ours fails


class NotApplicable(Exception):
    """The model cannot do this, whatever its attention function."""


@dataclass
class Row:
    """One model type under one function."""

    model_type: str
    model_class: str
    backend: str
    status: str = "right"
    reason: str = ""
    reached: str = ""
    checks: dict[str, str] = field(default_factory=dict)


class Subject:
    """A tiny model under one function, and twins of it with the same weights."""

    def __init__(self, model_type: str, function: str):
        self.model_type, self.function = model_type, function
        self.cls = catalogue.model_class(model_type)

    @cached_property
    def softmax(self) -> PreTrainedModel:
        """The model's own softmax: its eager attention, or sdpa where that gives no number."""
        eager = _sharpen(_build(self.cls, tiny.tiny(self.model_type), "eager"))
        if self.cls._supports_sdpa and not _finite(eager, samples.inputs(eager)):
            return _with_weights(_build(self.cls, tiny.tiny(self.model_type), "sdpa"), eager)
        return eager

    @property
    def inputs(self) -> dict:
        """Fresh each time: the video models take a session that a forward pass changes."""
        return samples.inputs(self.softmax)

    @cached_property
    def default(self) -> PreTrainedModel:
        """Given the function's name and no more."""
        model = _build(self.cls, tiny.tiny(self.model_type), self.function)
        return _with_weights(model, self.softmax)

    @cached_property
    def learned(self) -> PreTrainedModel:
        """With per-query terms as parameters that differ between heads and layers.

        Of sigmoid also those that are linear in the query and in what the module gets, where it
        gets one row a query.
        """
        for linear in (True, False) if self.function == "sigmoid" else (False,):
            config = tiny.tiny(self.model_type)
            for part in _leaves(config):
                hf_sigmoid.configure(part, self.function, learn=True, query=linear, hidden=linear)
            try:
                model = _with_weights(_build(self.cls, config, self.function), self.softmax)
                run(model, **self.inputs)
                break
            except ValueError as error:
                if not (linear and "expected it without" in str(error)):
                    raise
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for _, module in holders(model):
                for parameter in module.log_length.parameters():
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        return model


def _build(cls, config, function: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return cls._from_config(config, attn_implementation=function).eval()


def _leaves(config) -> list:
    parts = sub_configs(config)
    return [leaf for part in parts.values() for leaf in _leaves(part)] if parts else [config]


@torch.no_grad()
def _sharpen(model: PreTrainedModel) -> PreTrainedModel:
    """Weights such that attention is far from uniform and no gate hides it."""
    generator = torch.Generator().manual_seed(6)
    for _, module in attention_modules(model):
        for parameter in module.parameters():
            if parameter.dim() == 2:
                if not parameter.any():  # an output projection that starts at nothing
                    parameter.normal_(generator=generator)
                spread = parameter.float().std().clamp(min=1e-6)
                parameter.mul_(0.15 * (32 / parameter.shape[1]) ** 0.5 / spread)
    for name, parameter in model.named_parameters():
        gate = "gate" in name and parameter.dim() <= 1
        if (gate or ("bias" not in name and parameter.dim() == 1)) and parameter.abs().max() < 1e-3:
            parameter.fill_(0.3)
    return model


def _with_weights(model: PreTrainedModel, source: PreTrainedModel) -> PreTrainedModel:
    result = model.load_state_dict(source.state_dict(), strict=False)
    others = [key for key in result.missing_keys if ".log_length." not in key]
    assert not others and not result.unexpected_keys, (others, result.unexpected_keys)
    return model


# Comparing


def tensors(value) -> Iterator[Tensor]:
    """Every float tensor of a model's output, caches left out."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Cache):
        return
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)


def run(model: PreTrainedModel, **inputs) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return list(tensors(model(**inputs)))


def _finite(model: PreTrainedModel, inputs: dict) -> bool:
    """Is any number of the output finite? (None at all is an answer of whole numbers.)"""
    outputs = [output for output in run(model, **inputs) if output.numel()]
    return not outputs or any(torch.isfinite(output).any() for output in outputs)


def observe(model: PreTrainedModel, **inputs) -> list[Tensor]:
    """What every attention module gives, in order, and the model's output.

    The modules too, because some outputs hardly depend on attention: codes, boxes, matches.
    """
    seen: list[Tensor] = []

    def note(module, args, output):
        value = next(tensors(output), None)
        if value is not None:
            seen.append(value.detach())

    handles = [module.register_forward_hook(note) for _, module in attention_modules(model)]
    try:
        output = run(model, **inputs)
        return [*seen, *output]
    finally:
        for handle in handles:
            handle.remove()


def same(given, wanted, what: str = "") -> None:
    given, wanted = list(given), list(wanted)
    assert len(given) == len(wanted), f"{what}: {len(given)} tensors instead of {len(wanted)}"
    for each, right in zip(given, wanted, strict=True):
        assert each.shape == right.shape, f"{what}: shape {list(each.shape)}, {list(right.shape)}"
        finite = torch.isfinite(right)
        assert torch.isfinite(each)[finite].all(), f"{what}: not finite"
        if not finite.any():
            continue
        error = (each - right)[finite].abs().max() / right[finite].abs().max().clamp(min=1e-3)
        assert error < TOLERANCE, f"{what}: off by {error:.1e} of the largest"


def gradients(model: PreTrainedModel, inputs: dict) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    total = 0.0
    for value in tensors(model(**inputs)):
        if value.requires_grad and torch.isfinite(value).all():
            total = total + (value * torch.randn(value.shape, generator=generator)).sum()
    if not isinstance(total, Tensor):
        raise NotApplicable("its output has no gradient")
    total.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def same_gradients(given: dict, wanted: dict) -> None:
    wanted = {name: gradient for name, gradient in wanted.items() if gradient.numel()}
    for name, right in wanted.items():
        assert name in given, f"no gradient for {name}"
        scale = right.abs().max().clamp(min=1e-3 * max(g.abs().max() for g in wanted.values()))
        error = (given[name] - right).abs().max() / scale
        assert error < 20 * TOLERANCE, f"gradient of {name} off by {error:.1e} of the largest"
        assert torch.isfinite(given[name]).all(), f"gradient of {name} not finite"


# The checks that compare with an oracle


def check_equals_eager(subject: Subject) -> None:
    """Forward and every gradient, as the model's own eager attention with the softmax replaced."""
    if subject.softmax.config._attn_implementation == "sdpa":
        raise NotApplicable("its own eager attention gives no finite number")
    with oracle.eager(subject.function) as replaced:
        wanted = observe(subject.softmax, **subject.inputs)
        if subject.function == "sigmoid" and not replaced.count:
            raise NotApplicable("its eager attention is not a function that can be patched")
        if replaced.shifted:
            raise NotApplicable("its eager attention subtracts each row's maximum before softmax")
        wanted_gradients = gradients(subject.softmax, subject.inputs)
    same(observe(subject.default, **subject.inputs), wanted, "output")
    same_gradients(gradients(subject.default, subject.inputs), wanted_gradients)


def check_is_not_softmax(subject: Subject) -> None:
    """A model that runs softmax under our name would pass every comparison with itself."""
    softmax = observe(subject.softmax, **subject.inputs)
    moved = largest_change(observe(subject.learned, **subject.inputs), softmax)
    if moved > 1e-5:
        return
    mapping = AttentionInterface._global_mapping
    right = mapping[subject.function]

    def doubled(module, query, *args, **kwargs):
        return right(module, 2 * query, *args, **kwargs)

    with mock.patch.dict(mapping, {subject.function: doubled}):
        if largest_change(observe(subject.default, **subject.inputs), softmax) < 1e-5:
            raise NotApplicable("doubling every logit moves nothing: one key, or equal ones")
    raise AssertionError(f"differs from softmax by {moved:.1e} of the largest only")


def largest_change(given: list[Tensor], before: list[Tensor]) -> float:
    """Relative to the largest number of each tensor; 1 where a shape changed (other boxes kept)."""
    changes = [0.0]
    for a, b in zip(given, before, strict=True):
        if a.shape != b.shape:
            changes.append(1.0)
        elif a.numel():
            scale = b.abs().nan_to_num().max().clamp(min=1e-9)
            changes.append(float((a - b).abs().nan_to_num().max() / scale))
    return max(changes)


def check_equals_reference(subject: Subject) -> None:
    """Learned per-query terms: the fast path against the plain PyTorch specification."""
    fast = observe(subject.learned, **subject.inputs)
    fast_gradients = gradients(subject.learned, subject.inputs)

    def plain(name: str) -> Callable:
        return lambda *args, **options: getattr(reference, name)(*args, **options)[0]

    names = ("sigmoid_attention", "ssmax_attention")
    with mock.patch.multiple(functional, **{name: plain(name) for name in names}):
        same(fast, observe(subject.learned, **subject.inputs), "output")
        same_gradients(fast_gradients, gradients(subject.learned, subject.inputs))


def check_output_attentions(subject: Subject) -> None:
    """Weights are returned, and weights times values are the output."""
    if "output_attentions" not in str(inspect.signature(subject.softmax.forward)) and not any(
        getattr(subject.softmax, "_can_record_outputs", None) or {}
    ):
        raise NotApplicable("records no attention weights")
    calls: list = []

    def recorded(original):
        def call(module, query, key, value, *args, **kwargs):
            result = original(module, query, key, value, *args, **kwargs)
            calls.append((value, *result))
            return result

        return call

    model = subject.learned
    wanted = model(**subject.inputs)
    mapping = AttentionInterface._global_mapping
    with mock.patch.dict(mapping, {subject.function: recorded(mapping[subject.function])}):
        torch.manual_seed(0)
        output = model(**subject.inputs, output_attentions=True)
    given = [v for k, v in output.items() if "attentions" in k and v is not None]
    if not list(tensors(given)):
        eager = subject.softmax(**subject.inputs, output_attentions=True)
        if not list(tensors([v for k, v in eager.items() if "attentions" in k])):
            raise NotApplicable("returns no weights with softmax either")
        raise AssertionError("returns no weights")
    assert any(weights is not None for _, _, weights in calls), "no attention call made weights"
    for value, result, weights in calls:
        if weights is not None:
            groups = weights.shape[1] // value.shape[1]
            product = weights.to(value.dtype) @ value.repeat_interleave(groups, 1)
            same([product.transpose(1, 2)], [result], "weights times values")
    plain = {k: v for k, v in output.items() if "attentions" not in k}
    same(tensors({k: v for k, v in wanted.items() if k in plain}), tensors(plain), "output")


def check_save_and_load(subject: Subject) -> None:
    """A round trip keeps function and parameters."""
    model = subject.learned
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = subject.cls.from_pretrained(folder).eval()
    kept = {name: module.log_length.state_dict() for name, module in holders(model)}
    assert kept, "no attention module has learned per-query terms"
    found = {name: module.log_length.state_dict() for name, module in holders(again)}
    assert kept.keys() == found.keys(), "other modules have per-query terms"
    for name in kept:
        same(found[name].values(), kept[name].values(), name)
    same(run(again, **subject.inputs), run(model, **subject.inputs), "output")


# The checks that compare a model with itself


def check_padded(model: PreTrainedModel, subject: Subject) -> None:
    """Padding changes no real token: on the left for decoders, on the right for others."""
    given = inspect.signature(model.forward).parameters
    if set(subject.inputs) - {"input_ids", "decoder_input_ids"} or "attention_mask" not in given:
        raise NotApplicable(_takes(subject))
    ids, pad = subject.inputs["input_ids"], 4
    left = not model.config.is_encoder_decoder and model.can_generate()
    mask = torch.ones_like(ids)
    real = slice(pad, None) if left else slice(None, -pad)
    mask[0] = 0
    mask[0, real] = 1
    batch = {**subject.inputs, "input_ids": ids * mask, "attention_mask": mask}
    if left and "position_ids" in given:
        batch["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    decoder = {k: v[:1] for k, v in subject.inputs.items() if k != "input_ids"}
    alone = first(model, **decoder, input_ids=ids[:1, real])
    both = first(model, **batch)
    same([both[:1] if model.config.is_encoder_decoder else both[:1, real]], [alone], "padded row")
    whole = first(model, **{k: v[1:] for k, v in subject.inputs.items()})
    same([both[1:]], [whole], "whole row")


def check_packed(model: PreTrainedModel, subject: Subject) -> None:
    """Two documents in a row, told apart by their position ids, do not see each other."""
    given = inspect.signature(model.forward).parameters
    if set(subject.inputs) != {"input_ids"} or not model.can_generate():
        raise NotApplicable(_takes(subject))
    if "position_ids" not in given:
        raise NotApplicable("takes no position ids")
    ids, cut = subject.inputs["input_ids"][:1], 5
    positions = torch.cat([torch.arange(cut), torch.arange(ids.shape[1] - cut)])[None]
    packed = first(model, input_ids=ids, position_ids=positions, use_cache=False)
    same([packed[:, :cut]], [first(model, input_ids=ids[:, :cut], use_cache=False)], "first")
    same([packed[:, cut:]], [first(model, input_ids=ids[:, cut:], use_cache=False)], "second")


def first(model: PreTrainedModel, **inputs) -> Tensor:
    """Logits, or the last hidden state."""
    torch.manual_seed(0)
    with torch.no_grad():
        output = model(**inputs)
    for name in ("logits", "prediction_logits", "last_hidden_state"):
        if (value := getattr(output, name, None)) is not None:
            return value
    raise NotApplicable("no logits")


def check_generate_dynamic(model: PreTrainedModel, subject: Subject) -> None:
    """With a dynamic cache as without one, windows passed; left padding in the batch."""
    prompt = _prompt(model, subject)
    cached = _generate(model, prompt)
    plain = _generate(model, prompt, use_cache=False)
    assert torch.equal(cached.sequences, plain.sequences), "other tokens than without a cache"
    same(cached.logits, plain.logits, "logits")


def check_generate_static(model: PreTrainedModel, subject: Subject) -> None:
    prompt = _prompt(model, subject)
    static = _generate(model, prompt, cache_implementation="static")
    dynamic = _generate(model, prompt)
    assert torch.equal(static.sequences, dynamic.sequences), "other tokens than a dynamic cache"
    same(static.logits, dynamic.logits, "logits")


def check_generate_beams(model: PreTrainedModel, subject: Subject) -> None:
    prompt = _prompt(model, subject)
    cached = _generate(model, prompt, num_beams=2)
    plain = _generate(model, prompt, num_beams=2, use_cache=False)
    assert torch.equal(cached.sequences, plain.sequences), "other tokens than without a cache"


def check_generate_assisted(model: PreTrainedModel, subject: Subject) -> None:
    """Drafted by a model that disagrees now and then, checked by this one."""
    prompt = {k: v[1:] for k, v in _prompt(model, subject).items()}
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in draft.get_output_embeddings().parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    assisted = _generate(model, prompt, assistant_model=draft)
    alone = _generate(model, prompt)
    assert torch.equal(assisted.sequences, alone.sequences), "other tokens than unassisted"


def check_continuous_batching(model: PreTrainedModel, subject: Subject) -> None:
    """`generate_batch` as `generate`."""
    if model.config.is_encoder_decoder or set(subject.inputs) != {"input_ids"}:
        raise NotApplicable("transformers batches text decoders only")
    if not model.can_generate() or getattr(model, "_is_stateful", False):
        raise NotApplicable("does not generate" if not model.can_generate() else "is stateful")
    if not BATCHES_ANY_FUNCTION and subject.function == model.config._attn_implementation:
        raise NotApplicable("this release batches with kernels of its own, and is refused")
    prompts = [samples.tokens(1, length, seed=length)[0].tolist() for length in (3, 11, 7)]
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # Without sizes the cache takes most of the machine's memory.
    cache = ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64)
    done = model.generate_batch(
        inputs=prompts,
        generation_config=config,
        continuous_batching_config=cache,
        progress_bar=False,
    )
    assert len(done) == len(prompts), "not every prompt came back"
    for prompt, result in zip(prompts, done.values(), strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            alone = model.generate(
                ids, generation_config=config, attention_mask=torch.ones_like(ids)
            )
        assert result.generated_tokens == alone[0, len(prompt) :].tolist(), "other tokens"


def check_compile(model: PreTrainedModel, subject: Subject) -> None:
    """The forward pass as one graph."""
    if not getattr(model, "_can_compile_fullgraph", False):
        raise NotApplicable("transformers does not say that it compiles")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    same(run(compiled, **subject.inputs), run(model, **subject.inputs), "output")
    torch._dynamo.reset()


def _prompt(model: PreTrainedModel, subject: Subject) -> dict:
    tokens = model.config.is_encoder_decoder or "input_ids" in subject.inputs
    if not model.can_generate() or not tokens:
        raise NotApplicable("does not generate from tokens")
    inputs = dict(subject.inputs)
    inputs.pop("decoder_input_ids", None)
    # mllama would append these to its cache at every step: softmax does not notice a key that is
    # there twice, sigmoid does. From an image it makes them once.
    inputs.pop("cross_attention_states", None)
    if model.config.is_encoder_decoder or set(inputs) != {"input_ids"}:
        return inputs
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :3] = 0
    return {"input_ids": inputs["input_ids"] * mask, "attention_mask": mask}


def _takes(subject: Subject) -> str:
    return f"takes {', '.join(subject.inputs)}"


def _generate(model: PreTrainedModel, prompt: dict, **options):
    torch.manual_seed(0)
    return model.generate(
        **prompt,
        **{
            "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False,
            "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0,
            "decoder_start_token_id": 1, **options,
        },
    )  # fmt: skip


ORACLES = (
    check_equals_eager, check_is_not_softmax, check_equals_reference, check_output_attentions,
    check_save_and_load,
)  # fmt: skip
CONSISTENT = (
    check_padded, check_packed, check_generate_dynamic, check_generate_static,
    check_generate_beams, check_generate_assisted, check_continuous_batching, check_compile,
)  # fmt: skip

# The weights last: asking for them makes transformers install hooks that some models (pe_video's)
# then do not compile with, under any attention function.
CHECKS = tuple(c for c in ORACLES + CONSISTENT if c is not check_output_attentions)
CHECKS += (check_output_attentions,)


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_):
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def examine(model_type: str, function: str, checks: tuple = CHECKS) -> Row:
    """Every check of one model type under one function."""
    row = Row(model_type, catalogue.model_types()[model_type], function)
    subject = Subject(model_type, function)
    try:  # the refusal comes first: it must not need a model that works
        with limited(SECONDS):
            _build(subject.cls, tiny.tiny(model_type), function)
    except Unsupported as error:
        return _ended(row, "refused", error)
    except Exception as error:
        refusal = error
    else:
        refusal = None
    try:
        with limited(SECONDS):
            if not _finite(subject.softmax, subject.inputs):
                raise NotApplicable("the tiny model gives no finite number with its own softmax")
    except Exception as error:
        return _ended(row, "not_built", error)
    if refusal is not None:
        return _ended(row, "wrong", refusal)
    try:
        with limited(SECONDS):
            row.reached = _reached(subject)
    except Unsupported as error:
        return _ended(row, "refused", error)
    except NotApplicable as error:
        return _ended(row, "not_built", error)
    except Exception as error:
        return _ended(row, "wrong", error)
    for check in checks:
        name = check.__name__.removeprefix("check_")
        row.checks[name] = _outcome(check, subject)
    failed = {name: text for name, text in row.checks.items() if text.startswith("FAILED")}
    if failed:
        row.status = "wrong"
        row.reason = "; ".join(f"{name}: {text[8:]}" for name, text in failed.items())
    return row


def _reached(subject: Subject) -> str:
    """How many attention modules one forward pass calls, of those that the model has."""
    called: set[int] = set()
    mapping = AttentionInterface._global_mapping
    original = mapping[subject.function]

    def noted(module: nn.Module, *args, **kwargs):
        called.add(id(module))
        return original(module, *args, **kwargs)

    with mock.patch.dict(mapping, {subject.function: noted}):
        run(subject.default, **subject.inputs)
    modules = [module for _, module in attention_modules(subject.default)]
    if not called:
        raise NotApplicable(f"the input reaches none of its {len(modules)} attention modules")
    return f"{len(called)} of {max(len(modules), len(called))}"


def _outcome(check: Callable, subject: Subject) -> str:
    """ "passed", "FAILED: why" or "not applicable: why"."""
    try:
        with limited(SECONDS):
            if check in ORACLES:
                check(subject)
            else:
                check(subject.learned, subject)
    except NotApplicable as reason:
        return f"not applicable: {reason}"
    except Exception as error:
        if fault := _fault_of_softmax(check, subject):
            return f"not applicable: softmax too, {fault}"
        return f"FAILED: {_line(error)}"
    return "passed"


def _fault_of_softmax(check: Callable, subject: Subject) -> str:
    """How the same check fails with the model's own softmax, "" if it passes.

    For these tokens or for others: where a model picks experts or keys by a comparison of near
    equal numbers, some tokens lie on the edge and others do not. In place of an oracle stands
    another softmax function, transformers' own.
    """
    twins = {
        check_equals_eager: _sdpa_equals_eager,
        check_equals_reference: _sdpa_equals_eager,
        check_save_and_load: _softmax_saves_and_loads,
    }
    if check in ORACLES and check not in twins:
        return ""
    for number in range(1 if check in twins else OTHER_TOKENS):
        try:
            with limited(SECONDS), samples.other_tokens(number):
                twins[check](subject) if check in twins else check(subject.softmax, subject)
        except Exception as error:
            return _line(error)
    return ""


def _sdpa_equals_eager(subject: Subject) -> None:
    # Until 5.21 sdpa drops a soft cap in silence, so it cannot stand in for one.
    capped = getattr(subject.softmax.config.get_text_config(), "attn_logit_softcapping", None)
    if not subject.cls._supports_sdpa or (capped and Version("5.21") > RELEASE):
        return
    model = _build(subject.cls, tiny.tiny(subject.model_type), "sdpa")
    model = _with_weights(model, subject.softmax)
    same(observe(model, **subject.inputs), observe(subject.softmax, **subject.inputs), "sdpa")
    wanted = gradients(subject.softmax, subject.inputs)
    same_gradients(gradients(model, subject.inputs), wanted)


def _softmax_saves_and_loads(subject: Subject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subject.softmax.save_pretrained(folder)
        again = subject.cls.from_pretrained(folder).eval()
    same(run(again, **subject.inputs), run(subject.softmax, **subject.inputs), "output")


def _ended(row: Row, status: str, error: Exception) -> Row:
    row.status, row.reason = status, _line(error)
    return row


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    named = isinstance(error, (AssertionError, NotApplicable, Unsupported))
    return text if named and text else f"{type(error).__name__}: {text}"
