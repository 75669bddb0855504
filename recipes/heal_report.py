"""The table and the picture of `heal_smollm2.py`."""

from pathlib import Path

from hf_sigmoid.conversions.report import table

ROWS = {
    "softmax": "softmax, as it is",
    "ssmax": "ssmax, identity",
    "converted": "sigmoid, calibrated",
    "numbers": "sigmoid, row numbers, gains, temperatures distilled",
    "healed": "sigmoid, then all weights",
}


def markdown(results: dict) -> str:
    """What it cost, model by model, and what the stages took."""
    base = results["perplexity"]["softmax"]
    sources = list(base)
    columns = [(source, length) for source in sources for length in base[source]]
    tokens = {name: curve[-1]["tokens"] for name, curve in results["curve"].items() if curve}
    trained = {"numbers": tokens["numbers"], "healed": tokens["numbers"] + tokens["healed"]}
    head = ["model", "tokens trained", *(f"{source}, {length}" for source, length in columns)]
    rows = []
    for name, label in ROWS.items():
        cells = [label, f"{trained[name]:,}" if name in trained else ""]
        for source, length in columns:
            value, before = results["perplexity"][name][source][length], base[source][length]
            ratio = "" if name == "softmax" else f" ({value / before:.3f} ×)"
            cells.append(f"{value:.2f}{ratio}")
        rows.append(cells)
    lengths = [f"{cell['length']} tokens" for cell in results["needles"][0]["lengths"]]
    found = [
        [label, *(f"{cell['correct']} of {cell['n']}" for cell in model["lengths"])]
        for label, model in zip(("softmax", "sigmoid, healed"), results["needles"], strict=True)
    ]
    lines = [*table(head, rows), "", *table(["needles found", *lengths], found)]
    calibration, forward = (results["calibration"][key] for key in ("calibration", "forward"))
    spent = ", ".join(f"{name} {seconds:,.0f}" for name, seconds in results["seconds"].items())
    worst = max(results["ssmax_logit_difference"].values())
    lines += [
        "",
        f"ssmax: the largest difference of a logit is {worst:.1e}. Calibration on 64 × 512 tokens: "
        f"{calibration['seconds']:.0f} s, peak memory {calibration['peak_bytes'] / 1e9:.2f} GB, "
        f"{calibration['peak_bytes'] / forward['peak_bytes']:.2f} times a forward's. Seconds by "
        f"stage, evaluation on the way included: {spent}. {results['threads']} threads, torch "
        f"{results['versions']['torch']}, transformers {results['versions']['transformers']}.",
        "",
    ]
    return "\n".join(lines)


def picture(results: dict, file: Path) -> None:
    """Perplexity on both sources against the tokens trained, as a multiple of softmax's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    base, start = results["perplexity"]["softmax"], results["perplexity"]["converted"]
    numbers, healed = results["curve"]["numbers"], results["curve"]["healed"]
    offset = numbers[-1]["tokens"]
    for number, source in enumerate(base):
        original = base[source]["1024"]
        points = [(0, start[source]["1024"])]
        points += [(line["tokens"], line[source]) for line in numbers]
        points += [(offset + line["tokens"], line[source]) for line in healed]
        tokens, values = zip(*points, strict=True)
        axes.plot(tokens, [v / original for v in values], "o-", color=f"C{number}", label=source)
    axes.axhline(1, color="0.5", linewidth=1)
    axes.axvline(offset, color="0.7", linewidth=1, linestyle=":")
    axes.text(offset, axes.get_ylim()[1], " all weights from here", va="top", color="0.4")
    axes.set(
        yscale="log", xlabel="tokens trained", ylabel="perplexity / softmax's",
        title="SmolLM2-135M with sigmoid attention in place of softmax, 1024 tokens",
    )  # fmt: skip
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:.0f}k")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(
        lambda value, _: f"{value:g}" if f"{value:g}"[0] in "125" else ""
    )
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)
    plt.close(figure)
