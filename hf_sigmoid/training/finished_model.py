"""The folder that a finished run leaves: `from_pretrained` loads it, and a card says how."""

import json
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from hf_sigmoid import embedded
from hf_sigmoid.checkpoint_files import give_back
from hf_sigmoid.conversions.card import how_to_load, known_base, origin
from hf_sigmoid.conversions.companions import copy_companions
from hf_sigmoid.conversions.folding import FILE as FOLDED
from hf_sigmoid.conversions.revert import REPORT
from hf_sigmoid.files import write_text
from hf_sigmoid.registration import FUNCTIONS
from hf_sigmoid.training import checkpointing, run_config, run_log
from hf_sigmoid.training.job import Job
from hf_sigmoid.training.run_folder import RECORD
from hf_sigmoid.training.run_keys import Run

ADAPTER = "adapter"
PLACES = ("model", "output_dir", "data.path", "data.dataset", "data.mixture", "evaluate.path")


def write(folder: Path, job: Job, source: str, model: Any, skipped: int) -> None:
    """Fill `final/`: every process calls it; weights that are divided are gathered.

    Args:
        source: the folder of the model that was trained on.
        skipped: steps that changed no weight.
    """
    run, main, probe = job.run, job.processes.main, None
    if run.parameters == "lora" and main:
        from hf_sigmoid.conversions.merging import Probe, merge

        model.save_pretrained(folder / ADAPTER)
        _name_the_base(folder / ADAPTER, _base(run))
        probe = Probe(model)
        model = merge(model)
    if main or job.processes.layout.splits_weights:
        checkpointing.save_whole(folder, model, main=main)
    if not main:
        return
    # What was frozen; merged weights in the source's dtype, as `hf-sigmoid merge` has them.
    give_back(folder, source, cast=probe is not None)
    if probe is not None:
        try:
            probe.check(folder)
        except ValueError as error:
            raise FloatingPointError(
                f"{error}; {job.folder.checkpoints} has the adapter's last checkpoint"
            ) from error
    job.tokenizer.save_pretrained(folder)
    copy_companions(source, folder)
    for name in (REPORT, FOLDED):  # what `hf-sigmoid revert` needs of a converted model
        if (Path(source) / name).is_file():
            shutil.copy2(Path(source) / name, folder / name)
    # Names, not places: this folder goes where the model goes (`config.yaml` has the places).
    keys = {key: value for key, value in run_config.flat(run).items() if key not in PLACES}
    record = {
        "step": run.steps, "skipped": skipped, "model": _base(run),
        "text": job.corpus.describe(), "text_sha256": job.corpus.fingerprint, **keys,
    }  # fmt: skip
    write_text(folder / RECORD, json.dumps(record, indent=1) + "\n")
    attention = model.config._attn_implementation
    (folder / "README.md").write_text(card(job, source, attention), encoding="utf-8")


def card(job: Job, source: str, attention: str) -> str:
    """`README.md`, with the front matter that the hub reads."""
    run, tokens = job.run, job.tokens_per_step
    title = _base(run)
    # A folder here may be what was made of a model of the hub.
    base = known_base(source) if Path(run.model).exists() else title
    data = ModelCardData(
        base_model=base, library_name="transformers", pipeline_tag="text-generation",
        tags=["hf-sigmoid", *([f"{attention}-attention"] if attention in FUNCTIONS else [])],
    )  # fmt: skip
    what = {
        "all": "all weights", "attention": "the attention weights",
        "log_length": "the attention's per-query terms alone",
        "lora": f"adapters of rank {run.lora.rank}, merged here (`{ADAPTER}/` has them apart)",
    }[run.parameters]  # fmt: skip
    lines = [
        f"# {title}, pretrained on with {attention} attention",
        f"{run.steps:,} steps of {tokens:,} tokens, {run.steps * tokens:,} in all; trained: "
        f"{what}. Text: {job.corpus.describe()} (fingerprint "
        f"`{job.corpus.fingerprint[:16]}`).",
        origin(source),
        _results(run_log.read(job.folder.log)),
        how_to_load(job.folder.final.name, "AutoModelForCausalLM", attention in FUNCTIONS),
        "Keys of the run:",
        "```yaml\n" + _keys(run) + "```",
    ]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, lines)) + "\n"


def _base(run: Run) -> str:
    """The hub's name of what was trained on, or its folder's."""
    if run.model == embedded.NAME:
        return embedded.HUB_ID
    return Path(run.model).resolve().name if Path(run.model).exists() else run.model


def _name_the_base(adapter: Path, name: str) -> None:
    """Instead of the place on this machine that PEFT writes; its card says nothing else."""
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"base_model_name_or_path": name}
    write_text(file, json.dumps(config, indent=2) + "\n")
    (adapter / "README.md").unlink(missing_ok=True)


def _results(log: list[dict[str, Any]]) -> str:
    """Loss, held-out loss and needles before and after, and what was skipped."""
    before, after = (log[0].get("before") or {}), log[-1]
    rows = [("loss of a step (nats a token)", log[0]["loss"], after["loss"])]
    rows += [
        (f"{label} `{name}`", before.get(kind, {}).get(name), value)
        for kind, label in (("held_out", "loss (nats a token) on"), ("needle", "needles found at"))
        for name, value in after.get(kind, {}).items()
    ]
    table = ["| | first or before | last |", "|---|---|---|"]
    table += [f"| {name} | {_shown(old)} | {_shown(new)} |" for name, old, new in rows]
    if skipped := after.get("skipped"):
        table += ["", f"{skipped} steps were skipped: their loss or gradient was not finite."]
    return "\n".join(table)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _keys(run: Run) -> str:
    """The keys that differ from the defaults, but for places on the machine that trained."""
    default = run_config.defaults(Run)
    return "".join(
        f"{key}: {json.dumps(value)}\n"
        for key, value in run_config.flat(run).items()
        if value != default[key] and key not in PLACES
    )
