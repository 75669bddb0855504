"""A conversion's report, to read."""

from collections.abc import Sequence
from pathlib import Path

from hf_sigmoid.conversions.plan import Plan


def markdown(report: dict, plan: Plan) -> str:
    """`report.md`: what was done, what it cost, and module by module how near it came."""
    parts = [
        [f"# {plan.model_type}: softmax to {plan.function}", "", f"{plan}."],
        _summary(report),
        _rope(report),
        _by_length(report),
        _modules(report),
        _distilled(report),
        _pictures(report),
        _stages(report),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def cost(report: dict) -> str:
    """The cost of a conversion, in a sentence."""
    metric, window = report["metric"], report["window"]
    if not {"perplexity_after", "hidden_state_change"} & report.keys():
        differences = report.get("largest_logit_difference", {}).values()
        same = f"the largest difference of a logit is {max(differences, default=0):.1e}, "
        return f"{same if differences else ''}{metric} was not measured"
    if "perplexity_after" not in report:
        return f"{metric} on {window} tokens: {report['hidden_state_change']:.3f}"
    before, after = report["perplexity_before"], report["perplexity_after"]
    return (
        f"{metric} on {window} tokens: {before:.3f} before, {after:.3f} after "
        f"({after / before:.3f} times)"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _summary(report: dict) -> list[str]:
    rows = [["source", report["source"]]]
    if revision := report["base"]["revision"]:
        rows.append(["revision", revision])
    rows.append(["SHA-256 of its weights", f"`{report['weights_sha256']}`"])
    rows += [[f"option `{name}`", str(value)] for name, value in report["options"].items()]
    for name in ("calibration", "evaluation"):
        if f"{name}_text" in report:
            digest = (report[f"{name}_text_sha256"] or "unknown")[:16]
            tokens = report.get(f"{name}_tokens")
            tokens = f", {tokens} tokens" if tokens else ""
            rows.append([f"{name} text", f"{report[f'{name}_text']}{tokens}, SHA-256 `{digest}…`"])
    metric, sentence = report["metric"], cost(report)
    rows.append([f"**{metric}**", f"**{sentence.removeprefix(f'{metric} ')}**"])
    for key in ("perplexity_of_starts", "hidden_state_change_of_starts"):
        rows += [
            [f"{metric} from {name}", f"{value:.3f}"] for name, value in report.get(key, {}).items()
        ]
    rows += [
        [f"largest difference of a logit, {way}", f"{value:.1e}"]
        for way, value in report.get("largest_logit_difference", {}).items()
    ]
    return table(["", ""], rows)


def _rope(report: dict) -> list[str]:
    if "rope" not in report:
        return []
    return [
        f"The RoPE was changed by `{report['rope']['change']}` after the logits had been compared. "
        "**This is not an identity**: what ssmax alone computes is what the source computes, but "
        "the figures after the conversion are those with the other RoPE. `revert` takes it out."
    ]


def _by_length(report: dict) -> list[str]:
    lines: list[str] = []
    if lengths := report.get("lengths"):
        rows = [
            [
                str(row["tokens"]),
                f"{row['before']:.3f}",
                f"{row['after']:.3f}",
                f"{row['after'] / row['before']:.3f}" if row["before"] else "",
            ]
            for row in lengths
        ]
        lines += table(["tokens", f"{report['metric']} before", "after", "times"], rows)
    if needle := report.get("needle"):
        rows = [
            [
                str(row["tokens"]),
                str(row["samples"]),
                *(f"{row[f'accuracy_{when}']:.0%}" for when in ("before", "after")),
                *(f"{row[f'logprob_{when}']:.2f}" for when in ("before", "after")),
            ]
            for row in needle
        ]
        head = ["tokens", "needles", "found before", "after", "log-probability before", "after"]
        lines += ["", *table(head, rows)]
        lines += [
            f"\nNo needles in {length} tokens: {why}."
            for length, why in report["without_needle"].items()
        ]
    return lines


def _modules(report: dict) -> list[str]:
    if not (modules := report.get("modules")):
        return []
    head = ["module", "error with −log n", "as started", "row sum", "saturated", "R²", "residual"]
    rows = [
        [
            name,
            f"{row['relative_before']:.3f}",
            f"{row['relative']:.3f}",
            f"{row['row_sum']:.2f}",
            f"{row['saturated']:.3f}",
            f"{row['r_squared']:.3f}",
            f"{row['residual_nats']:.2f}",
        ]
        for name, row in modules.items()
    ]
    return [
        "Each module alone, on what it gets in the softmax model: the relative error of its output "
        "with the bias −log n and with the query bias that it starts from; with these the mean row "
        "sum of its weights (softmax's is 1), the share of rows whose largest weight is above "
        "0.99, and how well the fit predicts the log-sum-exp: R² and what it leaves, in nats.",
        "",
        *table(head, rows),
    ]


def distillations(report: dict) -> list[str]:
    """A paragraph for each distillation that followed."""
    return [_distillation(run) for run in report.get("distillations", [])]


def _distillation(run: dict) -> str:
    stages = [
        f"{run[f'{key}.train']} {name}, {run[f'{key}.steps']} steps"
        for name, key in (("layer by layer", "layerwise"), ("end to end", "end_to_end"))
        if run[f"{key}.steps"]
    ]
    sentence = (
        f"Then distilled from the softmax model on {run['tokens']:,} tokens in "
        f"{run['seconds']:.0f} s: {', then '.join(stages)} (numbers: per-query terms, gains and "
        "temperatures)."
    )
    if found := run["perplexity"]:
        each = ", ".join(f"{value:.2f} on {name}" for name, value in found.items())
        sentence += f" Perplexity on {run['train.block_size']} tokens afterwards: {each}."
    return sentence


def _distilled(report: dict) -> list[str]:
    lines: list[str] = []
    for run, sentence in zip(report.get("distillations", []), distillations(report), strict=True):
        lines += [sentence, ""]
        if run["output_errors"]:
            rows = [
                [name, f"{run['output_errors_before'][name] ** 0.5:.3f}", f"{error**0.5:.3f}"]
                for name, error in run["output_errors"].items()
            ]
            lines += [
                "Layer by layer, the relative error of each module's output after its projection, "
                "on the text of the first and of the last step:",
                "",
                *table(["module", "first step", "last step"], rows),
                "",
            ]
    return lines[:-1]


def _pictures(report: dict) -> list[str]:
    if report["pictures"] is None:
        return ["No pictures: they need matplotlib (`pip install 'hf-sigmoid[eval]'`)."]
    return [f"![{Path(name).stem.replace('_', ' ')}]({name})" for name in report["pictures"]]


def _stages(report: dict) -> list[str]:
    rows = [
        [row["stage"], f"{row['seconds']:.1f}", str(row["tokens"] or "")]
        for row in report["stages"]
    ]
    rows.append(["all, but for writing", f"{report['seconds']:.1f}", ""])
    return table(["stage", "seconds", "tokens"], rows)
