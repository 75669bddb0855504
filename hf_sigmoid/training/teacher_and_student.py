"""The converted model that is distilled and the softmax model that it follows: which may be."""

from typing import Any

from hf_sigmoid.configuration import find_section
from hf_sigmoid.conversions import folding
from hf_sigmoid.conversions.models import model_class
from hf_sigmoid.conversions.revert import check_untrained
from hf_sigmoid.embedded import checkpoint
from hf_sigmoid.errors import BadInput
from hf_sigmoid.loading import load_model
from hf_sigmoid.rope import RECORD as ROPE
from hf_sigmoid.training.distillation import softmax_inside
from hf_sigmoid.training.processes import Processes
from hf_sigmoid.training.run_keys import Distil


def load_both(run: Distil, processes: Processes) -> tuple[Any, Any, folding.Folded | None]:
    """Student, teacher, and what earlier distillations have folded into the student.

    Raises:
        BadInput: models that this kind of training is not for.
    """
    # As it was saved, so that the softmax model inside can be told by its hash.
    student = load_model(run.model)
    _check_student(student, run)
    try:
        folded = folding.Folded.load(run.model)
    except ValueError as error:
        raise BadInput(str(error)) from None
    if folded is not None and not folded.untouched(student):
        if run.teacher is None:
            raise BadInput(
                f"model {run.model}: its projections were trained since it was distilled: give "
                "teacher=SOFTMAX_CHECKPOINT"
            )
        folded.originals.clear()  # they are not those of these weights
    if run.teacher is not None:
        return student, _load_teacher(student, run, processes), folded
    teacher = softmax_inside(student, folded, {stage.train for stage in run.stages.values()})
    _check_source(teacher, run)
    return student, teacher, folded


def _check_student(student: Any, run: Distil) -> None:
    config, cls = student.config, model_class(student.config)
    section = getattr(config, "hf_sigmoid", None)
    refused = {
        "expected weights that can be trained, got quantised ones": getattr(
            student, "is_quantized", False
        ),
        f"expected a causal language model, got a {cls.__name__}": cls is not type(student),
        f"expected a plain language model, got a {cls.__name__}, of which a part is "
        "converted": not section and find_section(config),
        "expected a converted checkpoint, got one that runs softmax: hf-sigmoid convert makes "
        "one": not section,
        "its per-query terms are constants, none can be trained": section and not section["learn"],
    }
    if found := [said for said, wrong in refused.items() if wrong]:
        raise BadInput(f"model {run.model}: {found[0]}")
    if run.layerwise.steps and hasattr(config, ROPE):
        raise BadInput(
            f"layerwise.steps: expected 0 for {run.model}, whose RoPE was changed: its softmax "
            "model's inputs are rotated otherwise"
        )


def _load_teacher(student: Any, run: Distil, processes: Processes) -> Any:
    with processes.accelerator.local_main_process_first():
        path = checkpoint(run.teacher)
    teacher = load_model(path)
    if getattr(teacher.config, "hf_sigmoid", None):
        raise BadInput(f"teacher {run.teacher}: expected a softmax model, got a converted one")
    for key in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers"):
        expected, given = (getattr(m.config, key, None) for m in (student, teacher))
        if given != expected:
            raise BadInput(f"teacher {run.teacher}: expected {key} {expected}, got {given}")
    return teacher


def _check_source(teacher: Any, run: Distil) -> None:
    """The softmax model inside the checkpoint must be the one that it was converted from."""
    try:
        same = check_untrained(teacher, run.model)
    except ValueError as error:
        raise BadInput(f"model {run.model}: {error}; give teacher=SOFTMAX_CHECKPOINT") from None
    if not same:
        raise BadInput(
            f"model {run.model} was trained since it was converted, so that it holds no "
            "softmax model to distil: give teacher=SOFTMAX_CHECKPOINT"
        )
