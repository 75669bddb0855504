"""The report of an evaluation as plain text: warnings, sections of sentences and tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any

from hf_sigmoid.evals import pictures, wording
from hf_sigmoid.evals.statistics import SHARE
from hf_sigmoid.evals.wording import NONE, Summary

NO_PICTURES = "matplotlib is not installed: no PNG files (pip install matplotlib)"
SCORES = {
    "teacher": "teacher-forced: right if every token of the answer is the most likely one",
    "generate": "generated: right if what the model writes is the answer",
}
CHECKS = ("cached", "batched", "padded", "generated")

Row = dict[str, str]  # of a table, by column


@dataclass(frozen=True)
class ReportSection:
    """A heading; paragraphs, a list of facts, and tables as plain text; names of pictures."""

    title: str
    blocks: Sequence[str | tuple[str, ...] | list[Row]]
    pictures: Sequence[str] = ()


def warnings_of(summary: Summary) -> list[str]:
    """Sentences that a reader must know before any number."""
    texts = []
    for name, model in wording.named(summary).items():
        if model["extrapolates"]:
            texts.append(
                f"{name} extrapolates: some prompts are longer than the "
                f"{wording.whole(model['positions'])} positions it was made for."
            )
        if not model["round_trips"]:
            texts.append(
                f"{name}: its tokenizer does not give a text back (round_trips is false), so the "
                "prompts are the token ids that were used, and not their text."
            )
        checks = model["checks"]
        if checks and not checks["passed"]:
            numbers, most = {key: checks.get(key) for key in CHECKS}, checks["tolerance"]
            failed = ", ".join(
                f"{key} differs by {value:.2g}" for key, value in numbers.items() if value
                and value > most
            )  # fmt: skip
            texts.append(
                f"{name} failed the run's own checks: {failed or 'see below'}, with a tolerance of "
                f"{most:.2g} nats. Do not trust its numbers."
            )
    return texts


def sections(summary: Summary) -> list[ReportSection]:
    """The whole report, without sections that there are no data for."""
    made = (_accuracy, _depths, _compared, _losses, _attention, _checks, _tokens, _detail)
    found = [make(summary) for make in made]
    has_rows = [any(isinstance(block, list) and block for block in each.blocks) for each in found]
    sections = [_run(summary), *(each for each, has in zip(found, has_rows, strict=True) if has)]
    if find_spec("matplotlib") is None:
        sections.append(ReportSection("Pictures", [NO_PICTURES]))
    return sections


def _run(summary: Summary) -> ReportSection:
    facts = (
        f"Tasks: {', '.join(summary['tasks']) or NONE}",
        f"Prompt lengths, tokens: {', '.join(map(wording.whole, summary['lengths'])) or NONE}",
        f"Depths: {', '.join(map(wording.depth, summary['depths'])) or NONE}",
        f"Haystack: {summary['haystack']}; seed {summary['seed']}; {summary['dtype']}",
        *(f"Score, {SCORES.get(score, score)}" for score in summary["scores"]),
        f"Configuration {summary['config']}; "
        + ", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
    )
    rows = [
        {
            "model": name, "from": model["model"], "attention": model["attn"],
            "weights": model["weights"] or NONE, "rope": model["rope"] or NONE,
            "positions": wording.whole(model["positions"]), "prompt": model["prompt"],
        }
        for name, model in wording.named(summary).items()
    ]  # fmt: skip
    return ReportSection("What was run", [facts, *([rows] if rows else [])])


def _accuracy(summary: Summary) -> ReportSection:
    words = (
        "Pooled over depths, by prompt length in tokens: accuracy, its exact 95% interval, and the "
        "number of questions n. The effective length is the longest whose lower bound is at least "
        f"{SHARE:.0%} of the accuracy at the shortest length that all models were asked at."
    )
    if _share_haystacks(summary):
        words += " Questions that share a haystack are alike, so the intervals are too narrow."

    def effective(row: Row) -> str:
        reached = wording.named(summary)[row["model"]]["effective"].get(row["task"], NONE)
        return reached if reached == NONE else "none" if reached is None else wording.whole(reached)

    rows = _by_length(summary, "lengths", ("task", "model"), {"effective length": effective})
    return ReportSection("Accuracy", [words, rows])


def _depths(summary: Summary) -> ReportSection:
    words = "Depth is where in the haystack the needle lies, 0% the start."
    rows = _by_length(summary, "cells", ("task", "model", "depth"), {})
    return ReportSection("Accuracy by depth", [words, rows], [pictures.HEATMAP])


def _by_length(
    summary: Summary, part: str, by: Sequence[str], more: dict[str, Callable[[Row], str]]
) -> list[Row]:
    """A column a length, behind those of `by` and `more`; sorted by task."""
    lengths = sorted({cell["length"] for model in summary["models"] for cell in model[part]})
    found: dict[tuple[str, ...], Row] = {}
    for row in cell_rows(summary, part):
        line = {name: row[name] for name in by}
        line |= {name: write_cell(row) for name, write_cell in more.items()}
        line |= dict.fromkeys(map(wording.whole, lengths), NONE)
        line = found.setdefault(tuple(row[name] for name in by), line)
        line[row["length"]] = f"{row['accuracy']} ({row['95% interval']}) n={row['n']}"
    return _by_task(summary, found.values())


def _by_task(summary: Summary, rows: Any) -> list[Row]:
    order = wording.tasks(summary)
    return sorted(rows, key=lambda row: order.index(row["task"]))


def _compared(summary: Summary) -> ReportSection:
    columns = {
        "both right": "both", "only baseline": "only_first", "only the other": "only_second",
        "neither": "neither",
    }  # fmt: skip
    rows = [
        {
            "models": wording.against(summary, pair),
            "task": pair["task"],
            "length": wording.whole(pair["length"]) if pair["length"] is not None else "all",
            **{column: wording.whole(pair[key]) for column, key in columns.items()},
            "p": wording.probability(pair["p_value"]),
        }
        for pair in summary["pairs"]
    ]
    words = [
        "Both answer the same questions. p is the chance that, were they equally good, the "
        "questions which only one of them gets right would be split at least as unevenly (exact "
        "McNemar test, two-sided; not corrected for the number of rows)."
    ]
    if _share_haystacks(summary):
        words.append(
            "Some questions share a haystack and are not independent: p is then too small."
        )
    return ReportSection("Models compared", [*words, rows])


def _share_haystacks(summary: Summary) -> bool:
    pooled = [cell for model in summary["models"] for cell in model["lengths"]]
    return any(cell["n"] > cell["haystacks"] for cell in pooled)


def _losses(summary: Summary) -> ReportSection:
    blocks: list[Any] = []
    costs = [
        {
            "models": wording.against(summary, pair),
            "short": wording.positions(pair["short"]["start"], pair["short"]["stop"]),
            "short-context cost": wording.difference(pair["short"]),
            "long": wording.positions(pair["long"]["start"], pair["long"]["stop"]),
            "long-context gain": wording.difference(pair["long"], -1),
        }
        for pair in summary["loss_pairs"]
    ]
    if costs:
        blocks += [
            "What a model pays in loss at short context for what it gains at long, in nats a token "
            "with 95% bands, on the same tokens. A positive cost is worse than the baseline, a "
            "positive gain is better.",
            costs,
        ]
    named = wording.named(summary).items()
    columns = {name: (model["loss"], wording.loss) for name, model in named if model["loss"]}
    for pair in summary["loss_pairs"]:
        columns[wording.against(summary, pair, " − ")] = pair["bands"], wording.difference
    found: dict[tuple[int, int], Row] = {}
    for name, (bands, write_band) in columns.items():
        for band in bands:
            span = band["start"], band["stop"]
            line = {"positions": wording.positions(*span), **dict.fromkeys(columns, NONE)}
            found.setdefault(span, line)[name] = write_band(band)
    if found:
        rows = [found[span] for span in sorted(found)]
        blocks += ["Loss by position in nats a token, with 95% bands.", rows]
    return ReportSection("Loss by position", blocks, [pictures.LOSS])


def _attention(summary: Summary) -> ReportSection:
    rows = [
        {"task": entry["task"], "model": name, **_strongest_head(entry)}
        for name, model in wording.named(summary).items()
        for entry in model["attention"]
        if wording.strongest(entry["share"])
    ]
    words = (
        "Weight of the answer's rows on the needle, mean over samples. The strongest head has the "
        "largest share of its row's sum; layers and heads count from 0. n_eff = exp(entropy) says "
        "over how many keys a head spreads, n_eff₂ = 1/Σp² is the same with less regard for small "
        "weights; the medians are over all heads."
    )
    shown = [pictures.NEEDLE, pictures.N_EFF]
    return ReportSection("Attention on the needle", [words, _by_task(summary, rows)], shown)


def _strongest_head(entry: dict[str, Any]) -> Row:
    layer, head = wording.strongest(entry["share"])
    middle = median(wording.heads(entry["n_eff"]))
    return {
        "length": wording.whole(entry["length"]),
        "samples": wording.whole(entry["n"]),
        "keys": wording.whole(entry["keys"]),
        "strongest head": f"layer {entry['layers'][layer]}, head {head}",
        "share": wording.percent(entry["share"][layer][head]),
        "raw mass": f"{entry['mass'][layer][head]:.3g}",
        "row sum": f"{entry['total'][layer][head]:.3g}",
        "n_eff there": wording.spread(entry["n_eff"][layer][head]),
        "median n_eff": wording.spread(middle),
        "of keys": wording.percent(middle / entry["keys"]),
        "median n_eff₂": wording.spread(median(wording.heads(entry["n_eff_2"]))),
    }


def _checks(summary: Summary) -> ReportSection:
    rows = []
    for name, model in wording.named(summary).items():
        checks = model["checks"] or {}
        numbers = {key: wording.said(checks.get(key), ".2g") for key in (*CHECKS, "tolerance")}
        result = ("passed" if checks["passed"] else "FAILED") if checks else "not done"
        rows.append({"model": name, **numbers, "result": result})
    words = (
        "How far an answer's log-probabilities differ between one plain forward and a cache, "
        "another row, padding: Σ p |Δ log p| in nats, at the worst token; and by how much what "
        "the model generates falls short of the likeliest."
    )
    return ReportSection("The run's own checks", [words, rows])


def _tokens(summary: Summary) -> ReportSection:
    rows = [
        {
            "model": name, "task": each["task"], "forwarded": wording.whole(each["forwarded"]),
            "RULER's way": wording.whole(each["harness"]),
            "share": wording.percent(each["share"]),
        }
        for name, model in wording.named(summary).items()
        for each in model["tokens"]
    ]  # fmt: skip
    words = (
        "Tokens that went through the model, against what RULER's way would take: every prompt "
        f"whole. {NONE} is a task that RULER lacks."
    )
    return ReportSection("Tokens forwarded", [words, rows])


def _detail(summary: Summary) -> ReportSection:
    # What no cell has is no column, nor is what stands above.
    rows = cell_rows(summary, "lengths")
    always = {"model", "attn", "task", "length", "correct", "95% interval"}
    shown = always | {name for row in rows for name in row if row[name] != NONE}
    shown -= {"depth", "n", "accuracy"}
    words = (
        "Depths pooled. Log-prob is the mean over the answer's tokens, in nats; above decoys is "
        "how often the answer ranks above all wrong ones, whose number follows; generated is how "
        "often the model writes the answer, contained how much of it."
    )
    lines = [{name: row[name] for name in row if name in shown} for row in rows]
    return ReportSection("Every length in detail", [words, lines])


def cell_rows(summary: Summary, part: str) -> list[Row]:
    """Each cell of each model as text.

    Args:
        part: `lengths`, of pooled depths, or `cells`.
    """
    models = wording.named(summary).items()
    return [
        _row(name, model, cell) for name, model in models for cell in _by_task(summary, model[part])
    ]


def _row(name: str, model: dict[str, Any], cell: dict[str, Any]) -> Row:
    generated, decoys = cell["generated"], (cell["candidates"] or 1) - 1
    above = wording.percent(cell["first"]) + (f" ({wording.whole(decoys)})" if decoys else "")
    return {
        "model": name,
        "attn": model["attn"],
        "task": cell["task"],
        "length": wording.whole(cell["length"]),
        "depth": wording.depth(cell.get("depth")),
        "n": wording.whole(cell["n"]),
        "correct": f"{cell['correct']}/{cell['n']}",
        "accuracy": wording.percent(cell["accuracy"]),
        "95% interval": wording.interval(cell["interval_95"]),
        "log-prob": wording.said(cell["logprob"], ".2f"),
        "above decoys": above,
        "generated": f"{generated['correct']}/{cell['n']}" if generated else NONE,
        "contained": wording.percent(generated["contains"] if generated else None),
    }
