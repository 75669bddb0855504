"""The report of an evaluation: what it says, that it is safe, and that it is whole."""

import csv
import json
import random
import re
import sys
from html.parser import HTMLParser
from itertools import count, pairwise

import pytest
from matplotlib.colors import LinearSegmentedColormap

from hf_sigmoid.evals import clopper_pearson, mcnemar, pictures, report, wording
from hf_sigmoid.evals.attention import FIELDS
from hf_sigmoid.evals.sections import NO_PICTURES

TASKS = ("single", "multikey:16", "cwe:3x8x2")
LENGTHS = (512, 1024, 2048, 4096, 8192)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
ATTENTIONS = ("sdpa", "ssmax", "sigmoid")


def synthetic(models=2, tasks=2, lengths=2, depths=2, layers=3, bands=4, names=None):
    """A summary of made-up samples, in which every number is its own."""
    rng = random.Random(0)
    tasks, lengths, depths = TASKS[:tasks], LENGTHS[:lengths], DEPTHS[:depths]
    names = (names or [f"runs/{attn}/final@{attn}" for attn in ATTENTIONS])[:models]
    # Word lists have no depth.
    cells = [
        (task, length, depth)
        for task in tasks
        for length in lengths
        for depth in ((None,) if task.startswith("cwe") else depths)
    ]
    answers = {
        (name, *cell): [rng.random() < 0.95 - 0.06 * LENGTHS.index(cell[1]) for _ in range(20)]
        for name in names
        for cell in cells
    }

    def pooled(name, task, length):
        every = (each for key, each in answers.items() if key[:2] == (name, task)
                 and length in (key[2], None))  # fmt: skip
        return [answer for each in every for answer in each]

    made = [
        {
            "name": name, "model": name.rpartition("@")[0], "attn": ATTENTIONS[place],
            "weights": f"{place}{rng.getrandbits(40):010x}", "rope": "yarn:4" if place else None,
            "positions": 2048, "extrapolates": max(lengths) > 2048, "prompt": "base",
            "round_trips": True,
            "checks": {
                "cached": 1.25e-5 + place, "batched": 2.5e-5, "padded": 3.75e-5,
                "generated": None, "tolerance": 1e-3, "passed": not place,
            },
            "cells": [_cell(rng, *cell, answers[(name, *cell)]) for cell in cells],
            "lengths": [
                _cell(rng, task, n, None, pooled(name, task, n)) for task in tasks for n in lengths
            ],
            "effective": {task: lengths[0] if i else None for i, task in enumerate(tasks)},
            "tokens": [
                {"task": task, "forwarded": 70123 + i + place, "harness": None if i else 90321,
                 "share": None if i else 0.78}
                for i, task in enumerate(tasks)
            ],
            "attention": [
                _attention(rng, task, length, layers, ATTENTIONS[place] == "sigmoid")
                for task in tasks
                for length in lengths
            ],
            "loss": _bands(rng, bands, 4.0),
        }
        for place, name in enumerate(names)
    ]  # fmt: skip
    pairs = [
        {
            "first": names[0], "second": second, "task": task, "length": length,
            **vars(mcnemar(*(pooled(name, task, length) for name in (names[0], second)))),
        }
        for second in names[1:]
        for task in tasks
        for length in (*lengths, None)
    ]  # fmt: skip
    return {
        "config": "0123456789abcdef", "seed": 7, "haystack": "the built-in novel",
        "dtype": "float32", "scores": ["teacher", "generate"],
        "tasks": list(tasks), "lengths": list(lengths), "depths": list(depths),
        "versions": {"torch": "2.14.1", "transformers": "5.24.0", "hf_sigmoid": "0.1.0"},
        "models": made,
        "pairs": pairs,
        "loss_pairs": [
            {
                "first": names[0], "second": second, "bands": _bands(rng, bands, 0.0),
                "short": {"start": 0, "stop": 512, "mean": 0.0312, "low": 0.0211, "high": 0.0413},
                "long": {"start": 512, "stop": 1024, "mean": -0.151, "low": -0.201, "high": -0.101},
            }
            for second in names[1:]
        ],
    }  # fmt: skip


def _cell(rng, task, length, depth, answers):
    correct = sum(answers)
    return {
        "task": task, "ruler": "niah_single_2" if task == "single" else None,
        "length": length, "depth": depth, "n": len(answers), "haystacks": len(answers) // 2,
        "correct": correct, "accuracy": correct / len(answers),
        "interval_95": list(clopper_pearson(correct, len(answers))),
        "logprob": -rng.random() - 0.01, "first": 0.9, "candidates": 9,
        "generated": {"correct": correct - 1, "contains": 0.65},
    }  # fmt: skip


def _attention(rng, task, length, layers, is_sigmoid):
    share = [[min(0.99, rng.lognormvariate(-4.5, 1.3)) for _ in "12"] for _ in range(layers)]
    share[layers // 2][1] = 0.71
    total = [[3.5 if is_sigmoid else 1.0] * 2 for _ in share]
    spread = [[length ** rng.uniform(0.3, 0.95) for _ in "12"] for _ in share]
    return {
        "task": task, "length": length, "n": 6, "share": share, "total": total, "n_eff": spread,
        "mass": [[value * total[0][0] for value in each] for each in share],
        "n_eff_2": [[value / 2 for value in row] for row in spread],
        "layers": [4 * number + 3 for number in range(layers)],  # as of a hybrid model
        "keys": length + 0.5,
    }  # fmt: skip


def _bands(rng, count, level):
    edges = [0, *(16 * 2**i for i in range(count))]
    means = [level * (1 - 0.04 * i) + rng.uniform(-0.05, 0.05) for i in range(count)]
    return [
        {"start": start, "stop": stop, "mean": mean, "low": mean - 0.06, "high": mean + 0.07}
        for (start, stop), mean in zip(pairwise(edges), means, strict=True)
    ]


class Page(HTMLParser):
    """The text of a page, and whether each tag that opens closes in its place."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.text = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def has(self, text):
        return any(text in part for part in self.text)


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(pictures, "figures", lambda summary: iter(()))


@pytest.fixture
def quick_pictures(monkeypatch):
    """Figures are made, and not drawn: each file has its own number in it."""
    from matplotlib.figure import Figure

    numbers = count()
    monkeypatch.setattr(
        Figure, "savefig", lambda self, file, format: file.write_text(str(next(numbers)))
    )


def written(folder, summary):
    """The files by name, and the page, which is checked for what every page must be."""
    files = {file.name: file for file in report.write(folder, summary)}
    assert {file.name for file in folder.iterdir()} == set(files)
    text = files["report.html"].read_text(encoding="utf-8")
    assert not re.search(r"https?:|<script|@import|url\(|[^ ]src=", text, re.IGNORECASE)
    page = Page(text)
    assert ("html", {"lang": "en"}) in page.seen
    shown = [each for tag, each in page.seen if tag == "img"]
    assert {each["alt"] for each in shown} == {name for name in files if name.endswith(".png")}
    assert all(each["src"].startswith("data:image/png;base64,") for each in shown)
    markdown = files["report.md"].read_text(encoding="utf-8")
    # Every row of a table has as many cells as its header.
    for above, below in pairwise(markdown.splitlines()):
        if above.startswith("|") and below.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", above)) == len(re.findall(r"(?<!\\)\|", below))
    return files, markdown, page


def test_every_number_stands_in_the_words_and_on_the_page(tmp_path, no_pictures):
    summary = synthetic(models=3, tasks=3, lengths=3, depths=3)
    _, markdown, page = written(tmp_path, summary)
    expected = ["0123456789abcdef", "the built-in novel", "seed 7", "torch 2.14.1", "yarn:4"]
    expected += [model["weights"] for model in summary["models"]]
    for pair in summary["pairs"]:
        expected += [str(pair[key]) for key in ("both", "only_first", "only_second", "neither")]
        expected.append(wording.probability(pair["p_value"]))
    bands = [band for model in summary["models"] for band in model["loss"]]
    for band in bands + [band for pair in summary["loss_pairs"] for band in pair["bands"]]:
        expected += [f"{band[key]:.3f}" for key in ("mean", "low", "high")]
    expected += ["+0.031 (+0.021 to +0.041)", "+0.151 (+0.101 to +0.201)"]
    expected += ["1.3e-05", "2.5e-05", "3.7e-05", "0.001", "passed", "FAILED"]
    expected += ["not independent", "too narrow"]
    expected += ["70,123", "90,321", "78%", "layer 7, head 1", "71%", "2.48", "3.5"]
    for entry in (entry for model in summary["models"] for entry in model["attention"]):
        expected.append(wording.spread(entry["n_eff"][1][1]))
    for cell in (cell for model in summary["models"] for cell in model["lengths"]):
        expected += [f"{cell['correct']}/{cell['n']}", f"{cell['logprob']:.2f}"]
        expected += [f"{cell['generated']['correct']}/{cell['n']}", "90% (8)", "65%"]
    for cell in (c for m in summary["models"] for c in [*m["lengths"], *m["cells"]]):
        within = wording.interval(cell["interval_95"])
        expected += [f"{cell['accuracy']:.0%} ({within}) n={cell['n']}"]
    for text in expected:
        assert text in markdown, text
        assert page.has(text), text


def test_each_cell_is_in_the_csv_file(tmp_path, no_pictures):
    summary = synthetic(models=2, tasks=3, lengths=2, depths=3)
    summary["models"][0]["cells"][0].update(logprob=None, candidates=None, generated=None)
    files, _, _ = written(tmp_path, summary)
    assert json.loads(files["summary.json"].read_text()) == summary
    with files["cells.csv"].open(newline="") as file:
        lines = list(csv.DictReader(file))
    cells = [cell for model in summary["models"] for cell in model["cells"]]
    for line, cell in zip(lines, cells, strict=True):
        whole, numbers = ("length", "n", "haystacks", "correct"), ("accuracy", "first")
        assert [int(line[key]) for key in whole] == [cell[key] for key in whole]
        assert [float(line[key]) for key in numbers] == [cell[key] for key in numbers]
        for key in ("depth", "candidates", "logprob"):
            assert line[key] == ("" if cell[key] is None else str(cell[key]))
        assert [float(line["low_95"]), float(line["high_95"])] == cell["interval_95"]
        if cell["generated"]:
            assert int(line["generated_correct"]) == cell["generated"]["correct"]


def test_the_heatmap_says_each_cell_and_the_second_model_s_gain(tmp_path):
    summary = synthetic(models=3, tasks=1, lengths=1, depths=1)
    for model, right in zip(summary["models"], (15, 12, 1), strict=True):
        model["cells"][0].update(correct=right, accuracy=right / 20, interval_95=[0.5, 0.9])
    axes = dict(pictures.figures(summary))[pictures.HEATMAP].axes
    assert [axis.get_title() for axis in axes] == [
        "sdpa/final", "ssmax/final", "sigmoid/final", "ssmax/final − sdpa/final"
    ]  # fmt: skip
    said = [axis.texts[0].get_text() for axis in axes]
    assert said == ["75%\n50–90%", "60%\n50–90%", "5%\n50–90%", "-15\n75→60%"]
    (gain,) = axes[-1].images
    assert gain.norm(0.0) == 0.5 and pictures.DIFFERENCE[2] == "#f7f7f7"


@pytest.mark.parametrize("scale", [pictures.SHARE, pictures.DIFFERENCE])
def test_black_text_is_readable_on_every_colour(scale):
    colours = LinearSegmentedColormap.from_list("", scale)
    for place in range(101):
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
            for part in colours(place / 100)[:3]
        )
        assert (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) / 0.05 > 6  # WCAG's contrast


def test_names_are_escaped(tmp_path, no_pictures):
    long = "long " * 20
    names = ['<b>x</b>&"@sdpa', f'<i>a|`b`*[c]" {long}@ssmax']
    summary = synthetic(models=2, names=names) | {"haystack": "<s>&'\""}
    summary = json.loads(json.dumps(summary).replace("multikey:16", "<u>|&"))
    files, markdown, page = written(tmp_path, summary)
    assert not {"b", "i", "u", "s"} & {tag for tag, _ in page.seen}
    assert "b&gt;&amp;" in files["report.html"].read_text()
    for text in ('<b>x</b>&"', f'<i>a|`b`*[c]" {long.strip()}', "<u>|&", "<s>&'\""):
        assert page.has(text), text
    assert '\\<b\\>x\\</b\\>\\&"' in markdown
    assert "\\<i\\>a\\|\\`b\\`\\*\\[c\\]" in markdown
    ours = re.sub(r"(?m)^> \*\*Warning:\*\*", "", markdown)
    assert not re.search(r"(?<!\\)[<`*\[&]", ours)


def test_names_are_no_formulas_to_the_pictures(tmp_path):
    names = ["_m$\\x{$@sdpa", "$^_$ " + 20 * "long" + "@ssmax"]
    summary = synthetic(tasks=1, lengths=2, depths=1, names=names)
    files, _, _ = written(tmp_path, summary)
    assert len(files) == 8
    chart = dict(pictures.figures(summary))[pictures.LOSS].axes[0]
    labels = [text.get_text() for text in chart.get_legend().get_texts()]
    assert labels[0] == " _m\\$\\x{\\$"
    assert len(labels) == 3


def _one_model(summary):
    summary["models"] = summary["models"][:1]
    summary["pairs"] = summary["loss_pairs"] = []


def _no_attention(summary):
    summary["models"][0]["attention"] = []


def _one_point_of_loss(summary):
    _one_model(summary)
    band = {"start": 0, "stop": 1, "mean": 2.0, "low": 2.0, "high": 2.0}
    summary["models"][0].update(loss=[band], positions=None)


def _layers_without_weights(summary):
    for entry in (entry for model in summary["models"] for entry in model["attention"]):
        entry.update({key: [] for key in ("layers", *FIELDS)})


def _no_scores(summary):
    summary["scores"] = ["generate"]
    for model in summary["models"]:
        model["checks"] = model["positions"] = model["weights"] = None
        for cell in [*model["cells"], *model["lengths"]]:
            cell.update(logprob=None, first=None, candidates=None, generated=None)


def _nothing(summary):
    for key in ("models", "pairs", "loss_pairs", "tasks", "lengths", "depths", "scores"):
        summary[key] = []
    summary["versions"] = {}


def _empty_models(summary):
    for model in summary["models"]:
        model.update(cells=[], lengths=[], effective={}, tokens=[], attention=[], loss=[])
    summary["pairs"] = []
    summary["loss_pairs"][0]["bands"] = []


@pytest.mark.parametrize(
    ("lack", "has_maps", "has_heatmap"),
    [
        (_one_model, True, True), (_no_attention, True, True), (_one_point_of_loss, True, True),
        (_layers_without_weights, False, True), (_no_scores, True, True), (_nothing, False, False),
        (_empty_models, False, False),
    ],
)  # fmt: skip
def test_what_there_is_none_of_is_left_out(lack, has_maps, has_heatmap, tmp_path, quick_pictures):
    summary = synthetic(tasks=1, lengths=1, depths=1, bands=1)
    lack(summary)
    files, markdown, page = written(tmp_path, summary)
    assert "None" not in markdown and not page.has("nan")
    assert ("needle_mass.png" in files, "heatmap.png" in files) == (has_maps, has_heatmap)
    assert "n_eff.png" not in files  # one length says nothing about growth
    assert all(f"]({name})" in markdown for name in files if name.endswith(".png"))
    assert NO_PICTURES not in markdown
    assert report.table(summary).startswith("model")


def test_the_same_summary_gives_the_same_bytes_with_all_pictures(tmp_path):
    summary = synthetic(models=3, tasks=2, lengths=3, depths=2)
    once, markdown, _ = written(tmp_path / "once", summary)
    again, _, _ = written(tmp_path / "again", json.loads(json.dumps(summary)))
    drawn = ["heatmap.png", "needle_mass.png", "loss.png", "n_eff.png"]
    assert list(once) == ["cells.csv", "summary.json", "report.md", "report.html", *drawn]
    assert all(f"]({name})" in markdown for name in drawn)
    for name, file in once.items():
        assert file.read_bytes() == again[name].read_bytes(), name


@pytest.mark.parametrize("name", ["report.html", "heatmap.png"])
def test_an_interrupted_write_leaves_the_old_file(name, tmp_path, monkeypatch, quick_pictures):
    summary = synthetic(models=1, tasks=1, lengths=1, depths=1)
    files, _, _ = written(tmp_path, summary)
    before = files[name].read_bytes()

    def stop(source, target):
        if target.name == name:
            raise KeyboardInterrupt
        source.rename(target)

    monkeypatch.setattr("os.replace", stop)
    summary["models"][0]["cells"][0].update(correct=1, accuracy=0.05)
    with pytest.raises(KeyboardInterrupt):
        report.write(tmp_path, summary)
    assert files[name].read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_without_matplotlib_only_the_pictures_are_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.warns(UserWarning, match="matplotlib is not installed") as warned:
        files, markdown, page = written(tmp_path, synthetic(models=1, tasks=1, lengths=1))
    assert len(warned) == 1
    assert list(files) == ["cells.csv", "summary.json", "report.md", "report.html"]
    assert NO_PICTURES in markdown and page.has(NO_PICTURES)
    assert ".png)" not in markdown


def test_warnings_come_first(tmp_path, no_pictures):
    summary = synthetic(models=2)
    summary["models"][0].update(extrapolates=True, round_trips=False)
    _, markdown, page = written(tmp_path, summary)
    above = markdown.partition("## ")[0]
    assert "sdpa/final extrapolates: some prompts are longer than the 2,048 positions" in above
    assert "sdpa/final: its tokenizer does not give a text back (round_trips is false)" in above
    assert "ssmax/final failed the run's own checks: cached differs by 1," in above
    assert above.count("**Warning:**") == 3
    assert sum(each == ("p", {"class": "warning"}) for each in page.seen) == 3
    for model in summary["models"]:
        model.update(extrapolates=False, round_trips=True, checks=None)
        # Dependence is only spoken of where questions share a haystack.
        for cell in [*model["cells"], *model["lengths"]]:
            cell["haystacks"] = cell["n"]
    _, markdown, page = written(tmp_path, summary)
    assert not re.search("Warning|not independent|too narrow", markdown)
    assert page.has("not done")


def test_the_terminal_gets_a_line_for_each_model_task_and_length():
    summary = synthetic(models=2, tasks=2, lengths=2)
    summary["models"][1]["lengths"][0].update(logprob=None)
    header, *lines = report.table(summary).splitlines()
    names = ["model", "attn", "task", "length", "correct", "95% interval", "log-prob"]
    assert re.split("  +", header) == names
    assert len(lines) == 8
    assert len({len(line) for line in lines} | {len(header)}) == 1
    cell = summary["models"][0]["lengths"][1]
    correct, within = f"{cell['correct']}/{cell['n']}", wording.interval(cell["interval_95"])
    expected = ["sdpa/final", "sdpa", "single", "1,024", correct, within, f"{cell['logprob']:.2f}"]
    assert lines[1].split() == expected
    assert lines[4].split()[-1] == wording.NONE


def test_names_are_short_and_unique(tmp_path, monkeypatch):
    def names(*models):
        each = (model if isinstance(model, tuple) else (model, "sdpa", "") for model in models)
        return wording.short_names(
            [{"model": p, "attn": attn, "name": f"{p}@{attn}{rest}"} for p, attn, rest in each]
        )

    (tmp_path / "x" / "m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "x")
    assert names("w/x/m", "w/y/m", "smollm2") == ["x/m", "y/m", "smollm2"]
    assert names("a/x/k", "b/x/k", "k") == ["a/x/k", "b/x/k", "k"]
    assert names("a/final", "b/a/final", "b/final") == ["a/final", "b/a/final", "b/final"]
    assert names(".", "..") == ["x", tmp_path.name]
    two = ("a/m", "sdpa", ""), ("a/m", "sigmoid", "")
    assert names(*two, "b/n") == ["m@sdpa", "m@sigmoid", "n"]
    same = ("a/m", "sdpa", ""), ("a/m", "sdpa", "+yarn:4")
    assert names(*same) == ["a/m@sdpa", "a/m@sdpa+yarn:4"]
    taken = ("m", "sdpa", ""), ("m", "ssmax", ""), ("m@sdpa", "sdpa", "")
    assert len(set(names(*taken))) == 3


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0%"), (0.001, "<1%"), (0.25, "25%"), (0.999, ">99%"), (1.0, "100%"), (None, "–")],
)
def test_only_none_and_all_are_0_and_100_percent(share, text):
    assert wording.percent(share) == text


def test_intervals_are_rounded_outwards():
    assert wording.interval((0.5549, 0.9951)) == "55–100%"
    assert wording.interval((0.3, 0.9)) == "30–90%"  # 100 × 0.9 is a bit more than 90
