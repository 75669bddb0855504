"""The report in words: sections of sentences and tables, for `markdown.py` and `html.py`."""

from dataclasses import dataclass
from statistics import median
from typing import Any

from hf_sigmoid.evals import report
from hf_sigmoid.evals.intervals import SHARE
from hf_sigmoid.evals.report import NONE, Summary, Table

TITLE = "Long-context evaluation"

SCORES = {
    "teacher": "teacher-forced: right if every token of the answer is the most likely one",
    "generate": "generated: right if what the model writes is the answer",
}
CHECKS = ("cached", "batched", "padded", "generated")


@dataclass(frozen=True)
class Section:
    """A heading and what follows it: paragraphs, lists and tables, as plain text."""

    key: str
    title: str
    blocks: list[str | tuple[str, ...] | Table]


def warnings(summary: Summary) -> list[str]:
    """What a reader must know before any number."""
    texts = []
    for name, model in report.named(summary).values():
        if model["extrapolates"]:
            texts.append(
                f"{name} extrapolates: some prompts are longer than the "
                f"{report.whole(model['positions'])} positions it was made for."
            )
        if not model["round_trips"]:
            texts.append(
                f"{name}: its tokenizer does not give a text back (round_trips is false), so the "
                "prompts are the token ids that were used, and not their text."
            )
        checks = model["checks"]
        if checks and not checks["passed"]:
            texts.append(
                f"{name} failed the run's own checks: {_failed(checks)}, with a tolerance of "
                f"{report.small(checks['tolerance'])} nats. Do not trust its numbers."
            )
    return texts


def _failed(checks: dict[str, Any]) -> str:
    numbers = {key: checks.get(key) for key in CHECKS}
    wide = [key for key, value in numbers.items() if value and value > checks["tolerance"]]
    return (
        ", ".join(f"{key} differs by {report.small(numbers[key])}" for key in wide) or "see below"
    )


def sections(summary: Summary) -> list[Section]:
    """All that there is to say, without what there are no data for."""
    made = (_accuracy, _depths, _compared, _loss, _attention, _checks, _tokens, _detail)
    found = [_run(summary), *(make(summary) for make in made)]
    return [section for section in found if section.key == "run" or _has_rows(section)]


def _has_rows(section: Section) -> bool:
    return any(isinstance(block, Table) and block.rows for block in section.blocks)


def _run(summary: Summary) -> Section:
    lengths = ", ".join(map(report.whole, summary["lengths"])) or NONE
    facts = (
        f"Tasks: {', '.join(summary['tasks']) or NONE}",
        f"Prompt lengths, tokens: {lengths}",
        f"Depths: {', '.join(map(report.depth, summary['depths'])) or NONE}",
        f"Haystack: {summary['haystack']}; seed {summary['seed']}; {summary['dtype']}",
        *(f"Score, {SCORES.get(score, score)}" for score in summary["scores"]),
        f"Configuration {summary['config']}; "
        + ", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
    )
    header = ("model", "from", "attention", "weights", "rope", "positions", "prompt")
    rows = [
        (
            name, model["model"], model["attn"], model["weights"] or NONE,
            model["rope"] or NONE, report.whole(model["positions"]), model["prompt"],
        )
        for name, model in report.named(summary).values()
    ]  # fmt: skip
    return Section("run", "What was run", [facts, Table(header, rows, 7)])


def _accuracy(summary: Summary) -> Section:
    effective = {
        (task, name): report.whole(length) if length is not None else "none"
        for name, model in report.named(summary).values()
        for task, length in model["effective"].items()
    }
    words = (
        "Pooled over depths, by prompt length in tokens: accuracy, its exact 95% interval, and the "
        "number of questions n. The effective length is the longest whose lower bound is at least "
        f"{SHARE:.0%} of the accuracy at the shortest length that all models were asked at."
    )
    if _share_haystacks(summary):
        words += " Questions that share a haystack are alike, so the intervals are too narrow."
    headline = _by_length(summary, "lengths", ("task", "model"), effective)
    return Section("accuracy", "Accuracy", [words, headline])


def _depths(summary: Summary) -> Section:
    return Section(
        "depths",
        "Accuracy by depth",
        [
            "Depth is where in the haystack the needle lies, 0% the start.",
            _by_length(summary, "cells", ("task", "model", "depth")),
        ],
    )


def _by_length(
    summary: Summary,
    part: str,
    by: tuple[str, ...],
    effective: dict[tuple[str, ...], str] | None = None,
) -> Table:
    """One of effective lengths if they are given, and a column a length; sorted by task."""
    lengths = sorted({cell["length"] for model in summary["models"] for cell in model[part]})
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in report.rows(summary, part):
        text = f"{row['accuracy']} ({row['95% interval']}) n={row['n']}"
        found.setdefault(tuple(row[key] for key in by), {})[row["length"]] = text
    order = report.tasks(summary)
    rows = [
        (
            *key,
            *([] if effective is None else [effective.get(key, NONE)]),
            *(found[key].get(report.whole(length), NONE) for length in lengths),
        )
        for key in sorted(found, key=lambda key: order[key[0]])
    ]
    first = [] if effective is None else ["effective length"]
    return Table((*by, *first, *map(report.whole, lengths)), rows, len(by))


def _compared(summary: Summary) -> Section:
    names = report.only_names(summary)
    rows = [
        (
            f"{names[pair['second']]} against {names[pair['first']]}",
            pair["task"],
            report.whole(pair["length"]) if pair["length"] is not None else "all",
            *(report.whole(pair[key]) for key in ("both", "only_first", "only_second", "neither")),
            report.probability(pair["p_value"]),
        )
        for pair in summary["pairs"]
    ]
    header = (
        "models", "task", "length", "both right", "only baseline", "only the other", "neither", "p",
    )  # fmt: skip
    words = [
        "Both answer the same questions. p is the chance that, were they equally good, the "
        "questions which only one of them gets right would be split at least as unevenly (exact "
        "McNemar test, two-sided; not corrected for the number of rows)."
    ]
    if _share_haystacks(summary):
        words.append(
            "Some questions share a haystack and are not independent: p is then too small."
        )
    return Section("compared", "Models compared", [*words, Table(header, rows, 2)])


def _share_haystacks(summary: Summary) -> bool:
    pooled = [cell for model in summary["models"] for cell in model["lengths"]]
    return any(cell["n"] > cell["haystacks"] for cell in pooled)


def _loss(summary: Summary) -> Section:
    names = report.only_names(summary)
    blocks: list[Any] = []
    costs = [
        (
            f"{names[pair['second']]} against {names[pair['first']]}",
            _positions(pair["short"]),
            report.nats(pair["short"]),
            _positions(pair["long"]),
            report.nats(pair["long"], -1),
        )
        for pair in summary["loss_pairs"]
    ]
    if costs:
        header = ("models", "short", "short-context cost", "long", "long-context gain")
        blocks += [
            "What a model pays in loss at short context for what it gains at long, in nats a token "
            "with 95% bands, on the same tokens. A positive cost is worse than the baseline, a "
            "positive gain is better.",
            Table(header, costs, 1),
        ]
    series = {name: model["loss"] for name, model in report.named(summary).values()}
    series = {name: bands for name, bands in series.items() if bands}
    columns = {
        name: {_positions(band): _band(band) for band in bands} for name, bands in series.items()
    }
    for pair in summary["loss_pairs"]:
        title = f"{names[pair['second']]} − {names[pair['first']]}"
        columns[title] = {_positions(band): report.nats(band) for band in pair["bands"]}
    found = [*series.values(), *(pair["bands"] for pair in summary["loss_pairs"])]
    spans = sorted({(band["start"], band["stop"]) for bands in found for band in bands})
    if spans:
        places = [_positions({"start": start, "stop": stop}) for start, stop in spans]
        rows = [(at, *(each.get(at, NONE) for each in columns.values())) for at in places]
        blocks += [
            "Loss by position in nats a token, with 95% bands.",
            Table(("positions", *columns), rows, 1),
        ]
    return Section("loss", "Loss by position", blocks)


def _positions(band: dict[str, Any]) -> str:
    return f"{band['start']:,} to {band['stop'] - 1:,}"


def _band(band: dict[str, Any]) -> str:
    return f"{band['mean']:.3f} ({band['low']:.3f} to {band['high']:.3f})"


def _attention(summary: Summary) -> Section:
    header = (
        "task", "model", "length", "samples", "keys", "strongest head", "share", "raw mass",
        "row sum", "n_eff there", "median n_eff", "of keys", "median n_eff₂",
    )  # fmt: skip
    rows = [
        (entry["task"], name, *_head(entry))
        for name, model in report.named(summary).values()
        for entry in model["attention"]
        if report.strongest(entry["share"])
    ]
    order = report.tasks(summary)
    rows.sort(key=lambda row: order.get(row[0], len(order)))
    words = (
        "Weight of the answer's rows on the needle, mean over samples. The strongest head has the "
        "largest share of its row's sum; layers and heads count from 0. n_eff = exp(entropy) says "
        "over how many keys a head spreads, n_eff₂ = 1/Σp² is the same with less regard for small "
        "weights; the medians are over all heads."
    )
    return Section(
        "attention", "Attention on the needle", [words, *([Table(header, rows, 2)] * bool(rows))]
    )


def _head(entry: dict[str, Any]) -> tuple[str, ...]:
    layer, head = report.strongest(entry["share"])
    number = entry["layers"][layer]
    spread = median(report.heads(entry["n_eff"]))
    return (
        report.whole(entry["length"]),
        report.whole(entry["n"]),
        report.whole(entry["keys"]),
        f"layer {number}, head {head}",
        report.percent(entry["share"][layer][head]),
        f"{entry['mass'][layer][head]:.3g}",
        f"{entry['total'][layer][head]:.3g}",
        report.spread(entry["n_eff"][layer][head]),
        report.spread(spread),
        report.percent(spread / entry["keys"]),
        report.spread(median(report.heads(entry["n_eff_2"]))),
    )


def _checks(summary: Summary) -> Section:
    rows = []
    for name, model in report.named(summary).values():
        checks = model["checks"] or {}
        result = ("passed" if checks["passed"] else "FAILED") if checks else "not done"
        numbers = (report.small(checks.get(key)) for key in (*CHECKS, "tolerance"))
        rows.append((name, *numbers, result))
    words = (
        "How far an answer's log-probabilities differ between one plain forward and a cache, "
        "another row, padding: Σ p |Δ log p| in nats, at the worst token; and by how much what "
        "the model generates falls short of the likeliest."
    )
    return Section(
        "checks",
        "The run's own checks",
        [words, Table(("model", *CHECKS, "tolerance", "result"), rows, 1)],
    )


def _tokens(summary: Summary) -> Section:
    rows = [
        (
            name,
            each["task"],
            report.whole(each["forwarded"]),
            report.whole(each["harness"]),
            report.percent(each["share"]),
        )
        for name, model in report.named(summary).values()
        for each in model["tokens"]
    ]
    words = (
        "Tokens that went through the model, against what RULER's way would take: every prompt "
        f"whole. {NONE} is a task that RULER lacks."
    )
    header = ("model", "task", "forwarded", "RULER's way", "share")
    return Section("tokens", "Tokens forwarded", [words, Table(header, rows, 2)])


def _detail(summary: Summary) -> Section:
    lines = report.rows(summary)
    # What no cell has is no column.
    names = [
        name for name in report.COLUMNS
        if name in report.COLUMNS[:6] or any(line[name] != NONE for line in lines)
    ]  # fmt: skip
    words = (
        "Depths pooled. Log-prob is the mean over the answer's tokens, in nats; above decoys is "
        "how often the answer ranks above all wrong ones, whose number follows; generated is how "
        "often the model writes the answer, contained how much of it."
    )
    return Section("detail", "Every length in detail", [words, report.columns(lines, names, 3)])
