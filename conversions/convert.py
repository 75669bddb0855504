"""A softmax checkpoint in, an ssmax or sigmoid checkpoint out.

ssmax starts as the identity (multiplier 1 + 0·log n), so the converted model computes what the
original did, and that is verified before anything is written. sigmoid starts from a fit to the
log-sum-exp (`calibrate.py`): near, not equal; it needs healing by further training.
"""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig

from hf_sigmoid import configuration, text
from hf_sigmoid.conversions import card as cards
from hf_sigmoid.conversions import folding, hub, pictures
from hf_sigmoid.conversions import report as reports
from hf_sigmoid.conversions.checks import (
    check_arguments,
    check_disk,
    check_fitting,
    check_questions,
    check_source,
    check_weights_left_alone,
)
from hf_sigmoid.conversions.companions import copy_companions
from hf_sigmoid.conversions.compare import Measure, token_windows
from hf_sigmoid.conversions.evaluation import Evaluation, Questions
from hf_sigmoid.conversions.merging import Probe, merge, with_adapter
from hf_sigmoid.conversions.models import (
    load,
    loading_class,
    positions,
    save,
    skeleton,
)
from hf_sigmoid.conversions.plan import Plan, plan
from hf_sigmoid.conversions.reading import check_mask_token, check_runs_on_text
from hf_sigmoid.conversions.revert import (
    REPORT,
    check_untrained,
    fingerprint,
    restore_weights,
    revert,
)
from hf_sigmoid.conversions.stages import Stages
from hf_sigmoid.conversions.starts import calibration_sums, to_sigmoid, to_ssmax
from hf_sigmoid.embedded import checkpoint
from hf_sigmoid.files import check_new_folder, existing_parent, new_folder
from hf_sigmoid.loading import load_tokenizer
from hf_sigmoid.rope import RECORD as ROPE
from hf_sigmoid.rope import change_rope, check_rope
from hf_sigmoid.text import sources

STATISTICS = "stats.safetensors"


def convert(
    source: str | Path,
    target: str | Path,
    function: str,
    *,
    init: str | None = None,
    layers: Sequence[int] | str | None = None,
    part: str | None = None,
    keep_softmax: int = 0,
    rope: str | None = None,
    calibration: sources.Given = None,
    evaluation: sources.Given = None,
    stats: str | Path | None = None,
    window: int = 512,
    windows: int = 32,
    seed: int | None = None,
    lengths: Sequence[int] | None = None,
    needle: int = 0,
    push_to_hub: str | None = None,
    private: bool = False,
    device_map: str | dict | None = None,
    max_memory: dict | None = None,
    progress: bool = True,
) -> dict:
    """Convert a model that reads text and write it as a folder that `from_pretrained` loads.

    Args:
        source: checkpoint folder, hub id, or "smollm2" for the embedded one.
        target: folder to write; must not exist or be empty. Written under another name, then
            renamed.
        function: "ssmax" or "sigmoid".
        init: what the row numbers start from, see `Plan`. None: ssmax starts as the identity,
            sigmoid from the better on the evaluation text of "calibrated-query" and "calibrated".
        layers: indices of the layers to convert, or text as "0-15,not:3"; None converts all.
        part: of a composite model, the part to convert, see `plan`.
        keep_softmax: sigmoid only: so many layers, those farthest from their softmax output, stay
            softmax.
        rope: ssmax only: "theta:F", "ntk:F" or "yarn:F", another RoPE as well, see `rope.py`. Not
            an identity.
        calibration: text that sigmoid's row numbers are fitted on, files or "dataset:NAME", see
            `text/sources.py`; None takes the built-in text.
        evaluation: text for the perplexities and needles; "builtin" is the built-in text's held-out
            chapters, "none" measures nothing. None is "builtin", but "none" for ssmax's identity,
            whose logits are compared and do not change, unless `lengths` or `needle` ask.
        stats: `stats.safetensors` of an earlier conversion of the same model, instead of another
            pass over the calibration text.
        window, windows: length in tokens and number of the windows of both texts.
        seed: chooses the calibration windows, and the documents of a data set, at random; None
            takes windows spread evenly and documents in order.
        lengths: in tokens, of the perplexities and needles in the report; None takes powers of two
            up to the window.
        needle: also hide so many needles at each of three depths for every length, before and
            after.
        push_to_hub: "USER/NAME", where to upload the finished folder.
        private: the repository that is made there is private.
        device_map, max_memory: where the weights are kept meanwhile, as in `from_pretrained`;
            "auto" fills the GPUs, then the memory, and leaves the rest on the disk. None takes a
            GPU that holds the model, else the CPU.

    Returns:
        The report, also written as `report.json` and, to read, `report.md`.

    Raises:
        ValueError: bad arguments, an unsupported or already converted model, a hub that does not
            know the user, or a failed identity check; nothing has been written then.
        OSError: a failed upload; the folder is complete.
    """
    given = dict(locals())
    start = time.perf_counter()
    # Resolved, so that a link or "." is replaced by name like any other empty folder.
    target = Path(target).resolve()
    check_arguments(function, init, keep_softmax, window, windows)
    check_fitting(function, calibration, stats, seed)
    check_new_folder(target)
    if push_to_hub is not None:
        hub.check(push_to_hub, source)
    elif private:
        raise ValueError("--private goes with --push-to-hub")

    evaluation = evaluation[0] if evaluation in (["builtin"], ["none"]) else evaluation
    identity = function == "ssmax" and init in (None, "identity") and rope is None
    asked_for = evaluation is not None or lengths is not None or bool(needle)
    measured = evaluation != "none" and (asked_for or not identity)
    if not measured and (lengths is not None or needle):
        raise ValueError("--lengths and --needle measure on a text, got --evaluate none")

    path = checkpoint(source)
    config = AutoConfig.from_pretrained(path)
    part, layers = check_source(config, function, layers, part)
    tokenizer = load_tokenizer(path)
    empty = skeleton(config)
    chosen = plan(empty, function, layers=layers, init=init, part=part)
    change = None if rope is None else check_rope(empty, rope, function)
    mask_token = check_mask_token(empty, tokenizer)
    longest = positions(empty, part)
    if longest is not None and window > longest:
        raise ValueError(f"window must be at most the model's {longest} positions, got {window}")
    reach = longest if change is None else change.positions(config)
    check_questions(lengths, needle, reach)
    given_text = None if evaluation in ("builtin", "none") else evaluation
    evaluation_text = sources.read(
        given_text, text.held_out, "evaluation", tokenizer, windows * max(window, *(lengths or [0]))
    )
    questions = Questions(
        tokenizer, evaluation_text.content, window=window, windows=windows, lengths=lengths,
        needle=needle, positions=reach,
    )  # fmt: skip
    calibration_text = sources.read(
        calibration, text.train, "calibration", tokenizer, windows * window, seed=seed
    )
    calibration_ids = token_windows(
        tokenizer, calibration_text.content, window, windows, seed=seed, what="calibration text"
    )

    stages = Stages()
    with stages("loading"):
        model = load(
            path, device_map=device_map, max_memory=max_memory, offload_near=existing_parent(target)
        )
        check_runs_on_text(model, part, calibration_ids[:1, :8])
        check_disk(target, model)
        weights = fingerprint(model)
    report: dict = {
        "source": str(source), "base": cards.base_model(source, path, config),
        "weights_sha256": weights, "options": reports.options(convert, given),
        "window": window,
    }  # fmt: skip
    measure = Measure(model, part, mask_token, progress)
    report["metric"] = measure.name
    report["class"] = loading_class(model)
    asked = Evaluation(questions, measure, stages)
    if measured:
        report["evaluation_text"] = evaluation_text.name
        report["evaluation_text_sha256"] = evaluation_text.sha256
        report |= asked.before(model)
    fitted = None
    if function == "ssmax":
        with stages("identity check"):
            check_ids = questions.windows[:2, : min(window, 256)]
            report["largest_logit_difference"] = to_ssmax(model, chosen, check_ids)
        if change is not None:
            change_rope(model, change)
            report["rope"] = getattr(model.config, ROPE)
    else:
        fitted = calibration_sums(
            model, chosen, calibration_text, calibration_ids, stats=stats, weights=weights,
            stages=stages, progress=progress,
        )  # fmt: skip
        report["calibration_tokens"] = fitted.tokens
        report["calibration_text"] = calibration_text.name if stats is None else Path(stats).name
        report["calibration_text_sha256"] = fitted.text_sha256
        chosen, figures = to_sigmoid(
            model,
            chosen,
            fitted,
            asked,
            init=init if measured else chosen.init,
            keep_softmax=keep_softmax,
            progress=progress,
        )
        report |= figures
    report["plan"] = json.loads(chosen.to_json())
    if measured:
        report |= asked.after(model)
    report["stages"] = stages.rows()
    report["seconds"] = round(time.perf_counter() - start, 1)
    with new_folder(target) as folder:
        save(model, folder, path)
        tokenizer.save_pretrained(folder)
        copy_companions(path, folder)
        report["files_sha256"] = check_weights_left_alone(folder, path)
        report["pictures"] = pictures.draw(folder, model, report)
        (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(reports.markdown(report, chosen), encoding="utf-8")
        (folder / "README.md").write_text(
            cards.card(report, chosen, push_to_hub or target.name), encoding="utf-8"
        )
        if fitted is not None:
            fitted.save(folder / STATISTICS)
    if push_to_hub is not None:
        hub.push(target, push_to_hub, private=private)
    return report


def dry_run(
    source: str | Path,
    function: str,
    *,
    init: str | None = None,
    layers: Sequence[int] | str | None = None,
    part: str | None = None,
    keep_softmax: int = 0,
    rope: str | None = None,
) -> Plan:
    """What `convert` would do, from the config alone: no weights are loaded, nothing is written.

    Which layers `keep_softmax` keeps takes the weights: the plan is of all that were asked for.

    Raises:
        ValueError: as `convert`, where the config alone tells.
    """
    check_arguments(function, init, keep_softmax, window=4, windows=1)
    config = AutoConfig.from_pretrained(checkpoint(source))
    part, layers = check_source(config, function, layers, part)
    empty = skeleton(config)
    if rope is not None:
        check_rope(empty, rope, function)
    return plan(empty, function, layers=layers, init=init, part=part)


def revert_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    approximate: bool = False,
    device_map: str | dict | None = None,
) -> bool:
    """Write a converted checkpoint back as a softmax model.

    Args:
        approximate: also if its weights were trained since, so that the result is not the original.
        device_map: where the weights are kept meanwhile, as for `convert`.

    Returns:
        Are the weights those of the original, bit for bit?

    Raises:
        ValueError: not a converted checkpoint, weights that were trained since, a target that is
            not empty; nothing has been written then.
    """
    target = Path(target).resolve()
    check_new_folder(target)
    source = checkpoint(source)
    config = AutoConfig.from_pretrained(source)
    if not configuration.find_section(config):
        raise ValueError(f"the model must be a converted one, got {source} on softmax")
    near = existing_parent(target)
    model = revert(load(source, device_map=device_map, offload_near=near))
    check_disk(target, model)
    tokenizer = load_tokenizer(source)
    originals = restore_weights(model, source)
    unknown = approximate and not (Path(source) / REPORT).is_file()
    with new_folder(target) as folder:
        save(model, folder, source, originals=originals)
        exact = not unknown and check_untrained(model, source, folder)
        if not exact and not approximate:
            raise ValueError(
                f"the weights of {source} were trained since the conversion, so that softmax would "
                "not give back the original: --approximate writes it all the same"
            )
        tokenizer.save_pretrained(folder)
        copy_companions(source, folder)
    return exact


def merge_adapter(adapter: str | Path, base: str | Path, target: str | Path) -> None:
    """Write base and PEFT adapter as one checkpoint, trained row numbers included.

    Before the folder gets its name it is loaded, and must compute what base and adapter do.

    Raises:
        ValueError: an adapter that does not fit the base (`Unsupported`: row numbers on a base
            without), a merged model of other logits, a target that is not empty; nothing has been
            written then.
    """
    target = Path(target).resolve()
    check_new_folder(target)
    base = checkpoint(base)
    model = with_adapter(base, adapter)
    check_disk(target, model.get_base_model())
    tokenizer = load_tokenizer(base)
    probe = Probe(model)
    model = merge(model)
    with new_folder(target) as folder:
        save(model, folder, base, cast=True)
        tokenizer.save_pretrained(folder)
        copy_companions(base, folder)
        for name in (REPORT, folding.FILE):  # what `revert` needs of a converted base
            if (Path(base) / name).is_file():
                shutil.copy2(Path(base) / name, folder / name)
        probe.check(folder)
