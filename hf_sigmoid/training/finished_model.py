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
from hf_sigmoid.training import checkpointing, resuming, run_config

ADAPTER = "adapter"
PLACES = ("model", "output_dir", "data.path", "data.dataset", "data.mixture", "evaluate.path")


def write(training: Any) -> None:
    """`final/`: every process calls it; weights that are divided are gathered."""
    checkpointing.publish(
        training.final,
        lambda folder: _fill(training, folder),
        main=training.main,
        wait=training.accelerator.wait_for_everyone,
    )
    training.accelerator.wait_for_everyone()


def _fill(training: Any, folder: Path) -> None:
    model, run, source, probe = training._bare_model(), training.run, training.source, None
    if run.parameters == "lora" and training.main:
        from hf_sigmoid.conversions.merging import Probe, merge

        model.save_pretrained(folder / ADAPTER)
        _name_the_base(folder / ADAPTER, _base(run))
        probe = Probe(model)
        model = merge(model)
    if training.main or training.layout.splits_weights:
        checkpointing.save_whole(folder, model, main=training.main)
    if not training.main:
        return
    # What was frozen; merged weights in the source's dtype, as `hf-sigmoid merge` has them.
    give_back(folder, source, cast=probe is not None)
    if probe is not None:
        try:
            probe.check(folder)
        except ValueError as error:
            raise FloatingPointError(
                f"{error}; {training.checkpoints} has the adapter's last checkpoint"
            ) from error
    training.tokenizer.save_pretrained(folder)
    copy_companions(source, folder)
    for name in (REPORT, FOLDED):  # what `hf-sigmoid revert` needs of a converted model
        if (Path(source) / name).is_file():
            shutil.copy2(Path(source) / name, folder / name)
    # Names, not places: this folder goes where the model goes (`config.yaml` has the places).
    keys = {key: value for key, value in run_config.flat(run).items() if key not in PLACES}
    record = {
        "step": run.steps, "skipped": training.skipped, "model": _base(run),
        "text": training.corpus.describe(), "text_sha256": training.corpus.fingerprint, **keys,
    }  # fmt: skip
    write_text(folder / resuming.RECORD, json.dumps(record, indent=1) + "\n")
    log = [json.loads(line) for line in training.log_lines()]
    (folder / "README.md").write_text(card(run, model, log, training), encoding="utf-8")


def card(run: Any, model: Any, log: list[dict[str, Any]], training: Any) -> str:
    """`README.md`, with the front matter that the hub reads."""
    title = _base(run)
    attention = model.config._attn_implementation
    # A folder here may be what was made of a model of the hub.
    base = known_base(training.source) if Path(run.model).exists() else title
    data = ModelCardData(
        base_model=base, library_name="transformers", pipeline_tag="text-generation",
        tags=["hf-sigmoid", *([f"{attention}-attention"] if attention in FUNCTIONS else [])],
    )  # fmt: skip
    tokens = training.blocks_per_step * run.train.block_size
    what = {
        "all": "all weights", "attention": "the attention weights",
        "log_length": "the attention row numbers alone",
        "lora": f"adapters of rank {run.lora.rank}, merged here (`{ADAPTER}/` has them apart)",
    }[run.parameters]  # fmt: skip
    lines = [
        f"# {title}, pretrained on with {attention} attention",
        f"{run.steps:,} steps of {tokens:,} tokens, {run.steps * tokens:,} in all; trained: "
        f"{what}. Text: {training.corpus.describe()} (fingerprint "
        f"`{training.corpus.fingerprint[:16]}`).",
        origin(training.source),
        _results(log),
        how_to_load(training.final.name, "AutoModelForCausalLM", attention in FUNCTIONS),
        "Keys of the run:",
        "```yaml\n" + _keys(run) + "```",
    ]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, lines)) + "\n"


def _base(run: Any) -> str:
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


def _keys(run: Any) -> str:
    """What differs from the defaults, but for places on the machine that trained."""
    default = run_config.flat(type(run)())
    return "".join(
        f"{key}: {json.dumps(value)}\n"
        for key, value in run_config.flat(run).items()
        if value != default[key] and key not in PLACES
    )
