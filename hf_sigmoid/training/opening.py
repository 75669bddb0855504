"""The first lines of a run: the model, what trains, on what, and how much text there is."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hf_sigmoid.training.job import Job
from hf_sigmoid.training.layout import less_than_asked
from hf_sigmoid.training.reading_order import permutation
from hf_sigmoid.training.run_keys import Run

COUNTED = 1_000_000  # characters of a source that are encoded to know, or to guess, its tokens
A_DOCUMENT = 100  # characters that take as long as a document does apart from its own


def describe(
    job: Job, model: Any, trains: Iterable[str], attention: str | None = None
) -> Iterator[str]:
    """The lines.

    Args:
        model: may be on the meta device.
        trains: a line for each thing that trains, by `parameters`.
        attention: the function's name; None: the model's.
    """
    if not job.processes.main:
        return
    run, layout, accelerator = job.run, job.processes.layout, job.processes.accelerator
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT's
    precision = {"fp32": "float32", "bf16": "bfloat16 autocast over float32 weights"}
    yield (
        f"model {run.model}: {type(base).__name__}, attention "
        f"{attention or model.config._attn_implementation}, {layout} on "
        f"{accelerator.device.type}, {precision[run.train.precision]}"
        + less_than_asked(accelerator)
    )
    yield from trains
    read, corpus, total = run.steps * job.tokens_per_step, job.corpus, sum(job.corpus.weights)
    for said, source, weight in zip(
        corpus.describe().split("\n"), corpus.parts, corpus.weights, strict=True
    ):
        reading = _reading(source, job.encode, round(read * weight / total), job.counted)
        yield f"text {said}, {reading}"


def trains(run: Run, model: Any) -> str:
    found = sizes(model)
    return parameters(f"train.parameters={run.parameters}", found[True], sum(found.values()))


def sizes(model: Any) -> dict[bool, int]:
    """Parameters that train, and that do not."""
    found = {True: 0, False: 0}
    for parameter in model.parameters():
        found[parameter.requires_grad] += parameter.numel()
    return found


def parameters(kind: str, trained: int, total: int) -> str:
    return f"{kind}: {trained:,} of {total:,} parameters train ({trained / total:.2%})"


def _reading(source: Any, encode: Callable[[str], list[int]], read: int, known: int | None) -> str:
    """The tokens of a source, and the part of them that a run reads, or how often."""
    if known is None and source.is_streamed:
        return f"as many tokens as come, of which this run reads {read:,}"
    tokens, exact = (known, True) if known is not None else _tokens(source.documents, encode)
    often = f"{read / tokens:.3g} times over" if read > tokens else f"{read / tokens:.1%} of them"
    return f"{'' if exact else 'about '}{tokens:,} tokens; this run reads {read:,}, {often}"


def _tokens(documents: Any, encode: Callable[[str], list[int]]) -> tuple[int, bool]:
    """Tokens of documents, and whether all were counted: a second's work, and no more."""
    tokens, room, rows = 0.0, COUNTED, len(documents)
    for number, place in enumerate(permutation(rows, "a sample"), 1):
        document = documents[place]
        if document.strip():
            piece = document[: max(1, room)]
            tokens += len(encode(piece)) * len(document) / len(piece)
            room -= len(document)
        room -= A_DOCUMENT
        if room <= 0:
            all_read = number == rows and room + A_DOCUMENT >= 0
            return round(tokens / number * rows), all_read
    return round(tokens), True
