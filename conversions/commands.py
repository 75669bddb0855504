"""The verbs of `hf-sigmoid`: each gives its result as data, and the text that says it."""

import argparse
import json

from transformers import AutoConfig, PreTrainedConfig

from hf_sigmoid import configuration, loading, parameters, support, text
from hf_sigmoid.conversions.card import next_step
from hf_sigmoid.conversions.compare import Measure, token_windows
from hf_sigmoid.conversions.convert import check_arguments, dry_run
from hf_sigmoid.conversions.convert import convert as write_converted
from hf_sigmoid.conversions.merging import merge_adapter
from hf_sigmoid.conversions.models import find_part, load, part_of, parts, skeleton
from hf_sigmoid.conversions.plan import ranges
from hf_sigmoid.conversions.reading import check_mask_token, reader
from hf_sigmoid.conversions.report import cost
from hf_sigmoid.conversions.revert import revert_checkpoint
from hf_sigmoid.conversions.training import convert_training, is_training
from hf_sigmoid.conversions.verify import differences, runs
from hf_sigmoid.embedded import checkpoint
from hf_sigmoid.text import sources


def inspect(options: argparse.Namespace) -> tuple[dict, str]:
    """From the config alone: attention modules, both functions, the section of a conversion."""
    _, config = _existing(options.model)
    section = configuration.find_section(config)
    whole = skeleton(config)
    part, part_config = find_part(config, None)
    model = part_of(whole, part)
    modules = parameters.attention_modules(model)
    layers = sorted({parameters.layer_index(name, module) for name, module in modules} - {None})
    found = {
        "model_type": config.model_type,
        "attention": section["function"] if section else "softmax",
        "attention_modules": len(modules),
        "layers": ranges(layers),
        "heads": sorted({parameters.head_count(module) for _, module in modules}),
        "layer_types": sorted(set(getattr(part_config, "layer_types", None) or [])),
        "part": part,
        "parts": list(parts(config)),
        "section": dict(section) if section else None,
        "convertible_to": {},
    }
    for function in parameters.FUNCTIONS:
        try:
            support.check_softmax_model(model, function)
            found["convertible_to"][function] = "yes"
        except support.Unsupported as refusal:
            found["convertible_to"][function] = str(refusal)
    heads = " or ".join(map(str, found["heads"]))
    kinds = f" ({', '.join(found['layer_types'])})" if found["layer_types"] else ""
    lines = [
        f"{config.model_type}: {found['attention']} attention, {len(modules)} modules in layers "
        f"{found['layers']}{kinds}, {heads} query heads"
        if modules
        else f"{config.model_type}: no attention on transformers' attention interface",
        *(f"{function}: {answer}" for function, answer in found["convertible_to"].items()),
    ]
    if part:
        lines[0] += f"; of its parts {', '.join(found['parts'])} this is {part}"
    if section:
        lines[1:] = [f"section hf_sigmoid: {dict(section)}"]
    return found, "\n".join(lines)


def _existing(model: str) -> tuple[str, PreTrainedConfig]:
    """Where a model named on the command line lies, and its config.

    Raises:
        BadInput: there is none; the message names it.
    """
    source = checkpoint(model)
    return source, loading.load(AutoConfig, source)


def convert(options: argparse.Namespace) -> tuple[dict, str]:
    training = is_training(options.model)
    if not training:
        _existing(options.model)
    planned = {
        name: getattr(options, name) for name in ("init", "layers", "part", "rope", "keep_softmax")
    }
    if options.dry_run:
        if training:
            raise ValueError(f"--dry-run plans models, got a training checkpoint, {options.model}")
        return _dry_run(options, planned)
    if options.out is None:
        raise ValueError("expected a folder to write, or --dry-run")
    more = ("stats", "window", "windows", "device_map", "seed", "lengths", "needle")
    chosen = planned | {name: getattr(options, name) for name in more}
    chosen |= {"calibration": options.calibrate, "evaluation": options.evaluate}
    if training:
        if options.push_to_hub is not None:
            raise ValueError("--push-to-hub uploads models, got a training checkpoint")
        report = convert_training(
            options.model, options.out, options.function, base=options.base, **chosen
        )
        how = f"resume it by --config {options.out}/config.yaml output_dir={options.out}"
        if options.base is not None:
            how = f"build the model from {options.out}/model, then load_state"
        return report, f"{options.model} -> {options.out} ({options.function}): {how}"
    if options.base is not None:
        raise ValueError(f"--base is of an accelerate state folder, got {options.model}")
    report = write_converted(
        options.model, options.out, options.function, push_to_hub=options.push_to_hub,
        private=options.private, **chosen,
    )  # fmt: skip
    sentence = (
        f"{options.model} -> {options.out} ({options.function} from {report['plan']['init']}): "
        f"{cost(report)}"
    )
    if options.push_to_hub is not None:
        sentence += f"; uploaded as {options.push_to_hub}"
    for advice in next_step(report, options.out):
        sentence += "\n" + advice.translate(str.maketrans("", "", ">*`")).strip()
    return report, sentence


def _dry_run(options: argparse.Namespace, planned: dict) -> tuple[dict, str]:
    check_arguments(
        options.function, options.init, options.keep_softmax, options.calibrate, options.stats,
        options.seed,
    )  # fmt: skip
    chosen = dry_run(options.model, options.function, **planned)
    fields = {
        "plan": json.loads(chosen.to_json()),
        "rope": options.rope,
        "keep_softmax": options.keep_softmax,
    }
    also = f", its RoPE by {options.rope}" if options.rope else ""
    if options.keep_softmax:
        also += f", but for layers that stay softmax by {options.keep_softmax}"
    return fields, f"would change {chosen}{also}; nothing was written"


def verify(options: argparse.Namespace) -> tuple[dict, str]:
    """Logits in every way of running, and perplexity by length."""
    (original, _), (converted, config) = map(_existing, (options.against, options.model))
    if not configuration.find_section(config):
        raise ValueError(f"verify compares a converted model, got {options.model} on softmax")
    before, after = load(original), load(converted)
    tokenizer = loading.load_tokenizer(original)
    content = sources.read(
        options.text, text.held_out, "verification", tokenizer, 8 * max(options.lengths)
    ).content
    ids = token_windows(tokenizer, content, min(options.lengths), 2)[:, :256]
    part, _ = find_part(before.config, None)
    measure = Measure(before, part, check_mask_token(before, tokenizer), progress=True)
    found = {
        "largest_logit_difference": differences(
            runs(reader(before, part), ids), runs(reader(after, part), ids)
        ),
        "metric": measure.name,
        "perplexity": {
            length: [
                measure(model, token_windows(tokenizer, content, length, 8), f"{name} {length}")
                for name, model in (("before", before), ("after", after))
            ]
            for length in options.lengths
        },
    }
    lines = [
        f"largest difference of a logit, {way}: {value:.1e}"
        for way, value in found["largest_logit_difference"].items()
    ]
    lines += [
        f"{measure.name} at {length} tokens: {a:.3f} before, {b:.3f} after"
        + (f" ({b / a:.3f} times)" if a else "")
        for length, (a, b) in found["perplexity"].items()
    ]
    return found, "\n".join(lines)


def revert(options: argparse.Namespace) -> tuple[dict, str]:
    _existing(options.model)
    exact = revert_checkpoint(
        options.model, options.out, approximate=options.approximate, device_map=options.device_map
    )
    how = "the original's weights, bit for bit" if exact else "not the original: its weights moved"
    return {"exact": exact}, f"{options.model} -> {options.out} (softmax): {how}"


def merge(options: argparse.Namespace) -> tuple[dict, str]:
    merge_adapter(options.adapter, options.base, options.out)
    return {"out": options.out}, f"{options.adapter} on {options.base} -> {options.out}"
