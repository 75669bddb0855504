"""A conversion's report and model card, as text."""

from hf_sigmoid.conversions.plan import Plan


def markdown(report: dict, plan: Plan) -> str:
    """`report.md`: what was done, what it cost, and module by module how near it came."""
    ratio = report["perplexity_after"] / report["perplexity_before"]
    lines = [
        f"# {plan.model_type}: softmax to {plan.function}",
        "",
        f"{plan}.",
        "",
        "| | |",
        "|---|---|",
        f"| source | {report['source']} |",
        f"| SHA-256 of its weights | `{report['weights_sha256']}` |",
        f"| perplexity before, windows of {report['window']} tokens | "
        f"{report['perplexity_before']:.3f} |",
        f"| perplexity after | {report['perplexity_after']:.3f} ({ratio:.3f} times) |",
    ]
    for name, value in report.get("perplexity_of_starts", {}).items():
        lines.append(f"| perplexity from {name} | {value:.3f} |")
    if "calibration_tokens" in report:
        lines.append(f"| calibration tokens | {report['calibration_tokens']} |")
    for way, value in report.get("largest_logit_difference", {}).items():
        lines.append(f"| largest difference of a logit, {way} | {value:.1e} |")
    lines.append(f"| seconds | {report['seconds']} |")
    if modules := report.get("modules"):
        lines += [
            "",
            "Each module alone, on what it gets in the softmax model: the relative error of its "
            "output, the mean row sum of its weights (softmax's is 1), the share of rows whose "
            "largest weight is above 0.99, and how well the fit predicts the log-sum-exp.",
            "",
            "| module | output error | row sum | saturated | R² | residual, nats |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {name} | {row['relative']:.3f} | {row['row_sum']:.2f} | {row['saturated']:.3f} | "
            f"{row['r_squared']:.3f} | {row['residual_nats']:.2f} |"
            for name, row in modules.items()
        ]
    return "\n".join(lines) + "\n"


def card(report: dict, plan: Plan, name: str) -> str:
    """A model card: base model, method, figures, and the command that undoes it."""
    return f"""---
base_model: {report["source"]}
tags: [hf-sigmoid, {plan.function}]
---

# {report["source"]} with {plan.function} attention

{plan}. Weights of the base model: SHA-256 `{report["weights_sha256"]}`.

Perplexity on held-out text, {report["window"]} tokens: {report["perplexity_before"]:.3f} before,
{report["perplexity_after"]:.3f} after, without any training. Details: `report.md`.

    import hf_sigmoid
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("{name}")

Back to softmax: `hf-sigmoid revert {name} BACK`.
"""
