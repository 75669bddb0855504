"""What each command of `hf-sigmoid` does: its result as data, and the text that says it."""

import argparse

from transformers import AutoConfig, AutoTokenizer

from hf_sigmoid import parameters, support, text
from hf_sigmoid.conversions.compare import perplexity, token_windows
from hf_sigmoid.conversions.convert import convert as write_converted
from hf_sigmoid.conversions.convert import (
    dry_run,
    load,
    merge_adapter,
    read_text,
    revert_checkpoint,
    skeleton,
)
from hf_sigmoid.conversions.embedded import checkpoint
from hf_sigmoid.conversions.plan import ranges
from hf_sigmoid.conversions.verify import differences, runs


def inspect(options: argparse.Namespace) -> tuple[dict, str]:
    """From the config alone: attention modules, both functions, and the row numbers if any."""
    config = AutoConfig.from_pretrained(checkpoint(options.model))
    section = getattr(config, "hf_sigmoid", None)
    model = skeleton(config)
    modules = parameters.attention_modules(model)
    layers = sorted({parameters.layer_index(name, module) for name, module in modules} - {None})
    found = {
        "model_type": config.model_type,
        "attention": section["function"] if section else "softmax",
        "attention_modules": len(modules),
        "layers": ranges(layers),
        "heads": sorted({parameters.head_count(module) for _, module in modules}),
        "layer_types": sorted(set(getattr(config, "layer_types", None) or [])),
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
        f"{found['layers']}{kinds}, {heads} query heads",
        *(f"{function}: {answer}" for function, answer in found["convertible_to"].items()),
    ]
    if section:
        lines[1:] = [f"section hf_sigmoid: {dict(section)}"]
    return found, "\n".join(lines)


def convert(options: argparse.Namespace) -> tuple[dict, str]:
    if options.dry_run:
        chosen = dry_run(options.model, options.function, init=options.init, layers=options.layers)
        fields = {"plan": chosen.to_json()}
        return fields, f"would change {chosen}; nothing was written"
    if options.out is None:
        raise ValueError("expected a folder to write, or --dry-run")
    report = write_converted(
        options.model, options.out, options.function, init=options.init, layers=options.layers,
        keep_softmax=options.keep_softmax, calibration=options.calibrate,
        evaluation=options.evaluate, stats=options.stats, window=options.window,
        windows=options.windows,
    )  # fmt: skip
    return report, (
        f"{options.model} -> {options.out} ({options.function} from {report['plan']['init']}): "
        f"perplexity {report['perplexity_before']:.2f} before, "
        f"{report['perplexity_after']:.2f} after"
    )


def verify(options: argparse.Namespace) -> tuple[dict, str]:
    """Logits in every way of running, and perplexity by length."""
    content = text.held_out()
    if options.text is not None:
        content = read_text(options.text, None, "verification")
    paths = [checkpoint(options.against), checkpoint(options.model)]
    before, after = map(load, paths)
    tokenizer = AutoTokenizer.from_pretrained(paths[0])
    ids = token_windows(tokenizer, content, min(options.lengths), 2)[:, :256]
    found = {
        "largest_logit_difference": differences(runs(before, ids), runs(after, ids)),
        "perplexity": {
            length: [
                perplexity(
                    model, token_windows(tokenizer, content, length, 8), name=f"{name} {length}"
                )
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
        f"perplexity at {length} tokens: {a:.3f} before, {b:.3f} after ({b / a:.3f} times)"
        for length, (a, b) in found["perplexity"].items()
    ]
    return found, "\n".join(lines)


def revert(options: argparse.Namespace) -> tuple[dict, str]:
    exact = revert_checkpoint(options.model, options.out, approximate=options.approximate)
    how = "the original's weights, bit for bit" if exact else "not the original: its weights moved"
    return {"exact": exact}, f"{options.model} -> {options.out} (softmax): {how}"


def merge(options: argparse.Namespace) -> tuple[dict, str]:
    merge_adapter(options.adapter, options.base, options.out)
    return {"out": options.out}, f"{options.adapter} on {options.base} -> {options.out}"
