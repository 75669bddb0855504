"""The folder that a finished distillation leaves: a checkpoint like the one it began with."""

import json
from pathlib import Path
from typing import Any

from hf_sigmoid.checkpoint_files import give_back
from hf_sigmoid.conversions import folding, pictures
from hf_sigmoid.conversions.companions import copy_companions
from hf_sigmoid.conversions.convert import write_reports
from hf_sigmoid.conversions.revert import REPORT
from hf_sigmoid.training import checkpointing, run_config, run_log
from hf_sigmoid.training.job import Job
from hf_sigmoid.training.run_folder import RECORD

PLACES = ("model", "teacher", "output_dir", "data.path", "evaluate.path")


def write(folder: Path, job: Job, student: Any, folded: folding.Folded, modules: list[str]) -> None:
    """Fill `final/`, by the log of the whole run.

    Args:
        modules: the names of those whose errors the log has.
    """
    run, log = job.run, run_log.read(job.folder.log)
    checkpointing.save_whole(folder, student)
    job.tokenizer.save_pretrained(folder)
    give_back(folder, run.model)
    copy_companions(run.model, folder)
    if folded.factors:
        folded.save(folder, student, run.model)
    seconds = sum(job.tokens_per_step / line["tok_s"] for line in log)
    record = {"step": run.steps, "seconds": round(seconds, 1), **run_config.flat(run)}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    source = Path(run.model) / REPORT
    if source.is_file():
        # Names, not places: the report goes where the model goes.
        kept = {key: value for key, value in record.items() if key not in PLACES}
        errors = [dict(zip(modules, x["layers"], strict=True)) for x in log if "layers" in x]
        done = {
            **kept, "tokens": run.steps * job.tokens_per_step,
            "perplexity": next((x["perplexity"] for x in log[::-1] if "perplexity" in x), {}),
            "output_errors_before": errors[0] if errors else {},
            "output_errors": errors[-1] if errors else {},
        }  # fmt: skip
        report = json.loads(source.read_text(encoding="utf-8"))
        report.setdefault("distillations", []).append(done)
        report["pictures"] = pictures.draw(folder, student, report)
        write_reports(folder, report, folder.name.removesuffix(".tmp"))
