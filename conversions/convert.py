"""A softmax checkpoint in, an ssmax or sigmoid checkpoint out.

ssmax starts as the identity (query scale 1 + 0·log n), so the converted model computes what the
original did, and that is verified before anything is written. sigmoid starts from a fit to the
log-sum-exp (`calibrate.py`): near, not equal; it needs healing by further training.

Five steps: prepare (all that can be refused before weights are loaded), load, ask the model its
questions, change its attention, ask again; then the folder is written.
"""

import inspect
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_sigmoid import parameters, support, text
from hf_sigmoid.checkpoint_files import files_sha256, weights_of
from hf_sigmoid.conversions import hub, hybrid, pictures
from hf_sigmoid.conversions.card import base_model, card
from hf_sigmoid.conversions.companions import copy_companions
from hf_sigmoid.conversions.compare import Measure, token_windows
from hf_sigmoid.conversions.evaluation import Questions, Stages, ask, figures, questions
from hf_sigmoid.conversions.models import (
    check_disk,
    find_part,
    load,
    loading_class,
    model_class,
    positions,
    save,
    skeleton,
)
from hf_sigmoid.conversions.plan import Plan, check_config, check_init, parse_layers, plan
from hf_sigmoid.conversions.reading import check_mask_token, check_reads_text, check_runs_on_text
from hf_sigmoid.conversions.report import markdown
from hf_sigmoid.conversions.revert import REPORT, fingerprint
from hf_sigmoid.conversions.starts import Calibration, calibration_sums, to_sigmoid, to_ssmax
from hf_sigmoid.embedded import checkpoint
from hf_sigmoid.files import check_new_folder, existing_parent, new_folder
from hf_sigmoid.layer_types import layer_count
from hf_sigmoid.loading import load_tokenizer
from hf_sigmoid.rope import RECORD as ROPE
from hf_sigmoid.rope import Change, change_rope, check_rope
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
    keep_softmax: int | str = 0,
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
        init: what the query biases or scales start from, see `Plan`. None: ssmax starts as the
            identity, sigmoid from the best on the evaluation text of those that are calibrated.
        layers: indices of the layers to convert, or text as "0-15,not:3"; None converts all.
        part: of a composite model, the part to convert, see `plan`.
        keep_softmax: sigmoid only: layers that stay softmax, "auto:K" (or K), "needle:K", "kl:K",
            "needle:P%" or "kl:P%", see `hybrid.py`.
        rope: ssmax only: "theta:F", "ntk:F" or "yarn:F", another RoPE as well, see `rope.py`. Not
            an identity.
        calibration: text that sigmoid's query biases are fitted on, files or "dataset:NAME", see
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
    given, start = dict(locals()), time.perf_counter()
    # Resolved, so that a link or "." is replaced by name like any other empty folder.
    target = Path(target).resolve()
    check_arguments(function, init, keep_softmax, calibration, stats, seed)
    check_new_folder(target)
    if push_to_hub is not None:
        hub.check(push_to_hub, source)
    elif private:
        raise ValueError("--private goes with --push-to-hub")
    ready = _prepare(
        checkpoint(source), function, init=init, layers=layers, part=part, rope=rope,
        calibration=calibration, evaluation=evaluation, window=window, windows=windows, seed=seed,
        lengths=lengths, needle=needle, keep=hybrid.parse(keep_softmax),
    )  # fmt: skip
    chosen, asked, stages = ready.plan, ready.questions, Stages()
    with stages("loading"):
        near = existing_parent(target)
        model = load(ready.path, device_map=device_map, max_memory=max_memory, offload_near=near)
        check_runs_on_text(model, chosen.part, ready.calibration_ids[:1, :8])
        check_disk(target, model)
        weights = fingerprint(model)
    measure = Measure(model, chosen.part, ready.mask_token, progress)
    report: dict[str, Any] = {
        "source": str(source), "base": base_model(source, ready.path, ready.config),
        "weights_sha256": weights, "options": _options(given), "window": window,
        "metric": measure.name, "class": loading_class(model),
    }  # fmt: skip
    before = ask(model, asked, measure, stages, "before") if asked else None
    fitted = None
    if function == "ssmax":
        with stages("identity check"):
            ids = ready.windows[:2, : min(window, 256)]
            report["largest_logit_difference"] = to_ssmax(model, chosen, ids)
        if ready.rope is not None:
            change_rope(model, ready.rope)
            report["rope"] = getattr(model.config, ROPE)
    else:
        fitted = calibration_sums(
            model, chosen, ready.calibration, ready.calibration_ids, stats=stats, weights=weights,
            stages=stages, progress=progress,
        )  # fmt: skip
        report["calibration_tokens"] = fitted.tokens
        report["calibration_text"] = fitted.text_name
        report["calibration_text_sha256"] = fitted.text_sha256
        chosen, found = to_sigmoid(
            model, chosen, fitted, ready.windows, measure, stages,
            init=init, measured=asked is not None, keep=hybrid.parse(keep_softmax),
            ranked_on=ready.ranked_on, progress=progress,
        )  # fmt: skip
        report |= found
    report["plan"] = json.loads(chosen.to_json())
    if asked and before:
        report["evaluation_text"] = ready.text.name
        report["evaluation_text_sha256"] = ready.text.sha256
        report |= figures(asked, measure, before, ask(model, asked, measure, stages, "after"))
    report["stages"] = stages.rows()
    report["seconds"] = round(time.perf_counter() - start, 1)
    _write(target, model, ready, chosen, report, fitted, push_to_hub or target.name)
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
    keep_softmax: int | str = 0,
    rope: str | None = None,
) -> Plan:
    """The plan of `convert`, from the config alone: no weights are loaded, nothing is written.

    Which layers `keep_softmax` keeps takes the weights: the plan is of all that were asked for.

    Raises:
        ValueError: as `convert`, where the config alone tells.
    """
    check_arguments(function, init, keep_softmax)
    config = AutoConfig.from_pretrained(checkpoint(source))
    return _planned(config, function, init, layers, part, rope)[0]


@dataclass(frozen=True)
class Prepared:
    """A conversion before weights are loaded: what is planned, asked and read."""

    path: str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    plan: Plan
    rope: Change | None
    mask_token: int | None
    text: sources.Text  # to evaluate on
    windows: Tensor  # of it, [count, window]
    questions: Questions | None  # None: nothing is measured
    calibration: sources.Text
    calibration_ids: Tensor
    ranked_on: hybrid.Asked | None  # of the layers that may stay softmax


def _prepare(
    path: str, function: str, *, init, layers, part, rope, calibration, evaluation, window: int,
    windows: int, seed: int | None, lengths: Sequence[int] | None, needle: int,
    keep: hybrid.Keep | None,
) -> Prepared:  # fmt: skip
    if window < 4 or windows < 1:
        raise ValueError(
            f"expected a window of at least 4 tokens and 1 window, got {window} and {windows}"
        )
    if needle < 0:
        raise ValueError(f"--needle must be a number of needles, got {needle}")
    evaluation = evaluation[0] if evaluation in (["builtin"], ["none"]) else evaluation
    identity = function == "ssmax" and init in (None, "identity") and rope is None
    asked_for = evaluation is not None or lengths is not None or bool(needle)
    measured = evaluation != "none" and (asked_for or not identity)
    if not measured and (lengths is not None or needle):
        raise ValueError("--lengths and --needle measure on a text, got --evaluate none")
    config = AutoConfig.from_pretrained(path)
    chosen, change, empty = _planned(config, function, init, layers, part, rope)
    tokenizer = load_tokenizer(path)
    mask_token = check_mask_token(empty, tokenizer)
    longest = positions(empty, chosen.part)
    if longest is not None and window > longest:
        raise ValueError(f"window must be at most the model's {longest} positions, got {window}")
    reach = longest if change is None else change.positions(config)
    for length in lengths or ():
        if length < 4 or (reach is not None and length > reach):
            most = "" if reach is None else f" and at most the model's {reach} positions"
            raise ValueError(f"--lengths must be at least 4 tokens{most}, got {length}")
    given = None if evaluation in ("builtin", "none") else evaluation
    tokens = windows * max(window, *(lengths or [0]))
    held_out = sources.read(given, text.held_out, "evaluation", tokenizer, tokens)
    asked = questions(
        tokenizer, held_out.content, window=window, windows=windows, lengths=lengths,
        needle=needle, positions=reach,
    )  # fmt: skip
    fitted_on = sources.read(
        calibration, text.train, "calibration", tokenizer, windows * window, seed=seed
    )
    ids = token_windows(
        tokenizer, fitted_on.content, window, windows, seed=seed, what="calibration text"
    )
    ranked_on = None
    if keep and keep.ranking != "auto":
        ranked_on = hybrid.rows(keep.ranking, tokenizer, fitted_on.content, ids[:2])
    return Prepared(
        path, config, tokenizer, chosen, change, mask_token, held_out, asked.windows[window],
        asked if measured else None, fitted_on, ids, ranked_on,
    )  # fmt: skip


def _planned(
    config: PreTrainedConfig, function: str, init, layers, part, rope
) -> tuple[Plan, Change | None, PreTrainedModel]:
    """The plan, the change of the RoPE, and the model without weights that both were asked of."""
    cls = model_class(config)
    check_reads_text(cls)
    if isinstance(layers, str):
        layers = parse_layers(layers, layer_count(find_part(config, part)[1]))
    part, layers = check_config(config, layers, part)
    if part is None:
        support.check_class(cls, config, function)
    empty = skeleton(config)
    change = None if rope is None else check_rope(empty, rope, function)
    return plan(empty, function, layers=layers, init=init, part=part), change, empty


def check_arguments(
    function: str,
    init: str | None,
    keep_softmax: int | str,
    calibration: object = None,
    stats: object = None,
    seed: int | None = None,
) -> None:
    """Refuse a start of another function, and for ssmax what only sigmoid's start reads."""
    if function not in parameters.FUNCTIONS:
        raise ValueError(f"--to must be one of {', '.join(parameters.FUNCTIONS)}, got {function!r}")
    if init is not None:
        check_init(function, init)
    if hybrid.parse(keep_softmax) and function != "sigmoid":
        raise ValueError(
            f"--keep-softmax ranks layers for sigmoid, got {keep_softmax} for {function!r}"
        )
    fitting = {"--calibrate": calibration, "--stats": stats, "--seed": seed}
    given = [name for name, value in fitting.items() if value is not None]
    if given and function == "ssmax":
        raise ValueError(f"{' and '.join(given)} fit sigmoid's query biases, got --to ssmax")


def _write(
    target: Path, model: PreTrainedModel, ready: Prepared, chosen: Plan, report: dict,
    fitted: Calibration | None, name: str,
) -> None:  # fmt: skip
    with new_folder(target) as folder:
        save(model, folder, ready.path)
        ready.tokenizer.save_pretrained(folder)
        copy_companions(ready.path, folder)
        report["files_sha256"] = files_sha256(folder)
        # A model may call its weights otherwise than old files do: names say nothing there.
        same_names = weights_of(folder).keys() == weights_of(ready.path).keys()
        if same_names and report["files_sha256"] != files_sha256(ready.path):
            raise ValueError(
                f"the weights of {ready.path} must not change, and would: nothing was written"
            )
        report["pictures"] = pictures.draw(folder, model, report)
        write_reports(folder, report, name)
        if fitted is not None:
            fitted.save(folder / STATISTICS)


def write_reports(folder: Path, report: dict, name: str) -> None:
    """Write `report.json`, `report.md` and the model card `README.md` into a folder."""
    chosen = Plan.from_json(json.dumps(report["plan"]))
    for file, content in (
        (REPORT, json.dumps(report, indent=2) + "\n"),
        ("report.md", markdown(report, chosen)),
        ("README.md", card(report, chosen, name)),
    ):
        (folder / file).write_text(content, encoding="utf-8")


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `convert` that are not the default, as JSON can hold them."""
    return {
        name: _plain(given[name])
        for name, parameter in inspect.signature(convert).parameters.items()
        if parameter.default not in (parameter.empty, given[name]) and name != "progress"
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
