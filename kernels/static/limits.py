"""Limits of what the compiled kernels may cost, by row, and the growth that a baseline allows."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import triton
from cases import EXPANDED, is_plain
from compiled import Row

BASELINE = Path(__file__).with_name("baseline.json")
# Shared memory that one program may use, in kB (CUDA programming guide; CDNA3 ISA).
SHARED_KB = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
# Of each form of σ: special functions per score, and instructions per score of the forward loop,
# those of matrix products (ins/s) left out. A variant of a form (pair_…) has the form's limits.
FORMS = {
    "rsqrt": (2.0, math.inf),
    "pair": (1.5, 7.8),
    "halley": (1.0, math.inf),
    "tanh": (1.0, 5.7),
}
# float16 has not the range for a sum in units of 2^-60: half an instruction more a score. On sm_90
# at dim 128 the products have twice as many operands to address as at 64.
EXCEPTIONS = {"sm_90 forward sigmoid fp16 128": 8.2}


def limits(row: Row) -> Iterator[tuple[str, float, str, float]]:
    """Every limit that a row must keep: figure, value, "at most" or "at least", limit."""
    yield "shared kB", row.shared_bytes / 1024, "at most", SHARED_KB[row.target]
    if not is_plain(row.case):
        return
    yield "spilled bytes", row.spill_bytes, "at most", 0
    yield "local", row.total["local"], "at most", 0
    yield "serialized", row.serialized, "at most", 0
    is_backward = "backward" in row.kernel
    if is_backward:
        yield "atomics", row.total["atom"], "at most", 0
    if row.tile is None or "decode" in row.case:
        return
    is_sigmoid = row.case.startswith("sigmoid")
    form, mufu = row.form.split("_")[0], row.per_score("mufu")
    yield "hot loop", bool(row.loop), "at least", 1
    yield "known form", form in FORMS, "at least", 1
    form_mufu, form_instructions = FORMS.get(form, (0.0, 0.0))
    if row.target.startswith("gfx"):
        # Inline PTX compiles there without an error and is missing from the code.
        yield "mufu/score", mufu, "at least", form_mufu if is_sigmoid else 1.0
    if is_sigmoid and not is_backward:
        yield "shfl", row.loop["shfl"], "at most", 0
        yield "fmnmx", row.loop["fmnmx"], "at most", 0
        if row.target.startswith("sm"):
            yield "mufu/score", mufu, "at most", form_mufu
            if row.case != EXPANDED:
                most = EXCEPTIONS.get(str(row), form_instructions)
                yield "instructions/score", row.arithmetic, "at most", most
    if row.target == "sm_90":
        yield "overlap", row.overlap or 0.0, "at least", 0.5


def broken(row: Row) -> dict[str, str]:
    """A sentence for every limit that a row breaks, by figure."""
    if row.error:
        return {"error": f"{row}: {row.error}"}
    return {
        figure: f"{row}: {figure} is {value:.4g}, {bound} {limit:g} is allowed"
        for figure, value, bound, limit in limits(row)
        if (value > limit + 1e-6 if bound == "at most" else value < limit - 1e-6)
    }


def ratchet(row: Row) -> dict[str, float]:
    """The figures that a baseline keeps. Registers as a chip hands them out: eight at a time."""
    scores = {kind: round(row.per_score(kind), 4) for kind in ("instructions", "mufu")}
    return {"registers": -(-row.registers // 8) * 8, "spill_bytes": row.spill_bytes, **scores}


def read_baselines() -> tuple[dict, dict]:
    """The baselines of all Triton versions, and the installed one's, which may be empty."""
    baselines = json.loads(BASELINE.read_text(encoding="utf-8")) if BASELINE.exists() else {}
    return baselines, baselines.get(triton.__version__, {})


def write_baseline(rows: list[Row]) -> None:
    """Replace the installed version's figures of these rows; of one name, the largest."""
    figures: dict[str, dict[str, float]] = {}
    for row in rows:  # a call lists a mask's tiles once a kernel, of other sizes
        known = figures.setdefault(str(row), ratchet(row))
        known.update({name: max(known[name], value) for name, value in ratchet(row).items()})
    baselines, baseline = read_baselines()
    baselines[triton.__version__] = baseline | figures
    BASELINE.write_text(json.dumps(baselines, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def grown(row: Row, baseline: dict[str, dict[str, float]]) -> list[str]:
    """The figures of a row that are more than 5 % over its baseline."""
    before = baseline.get(str(row), {})
    return [
        f"{row}: {figure} was {before[figure]:g}, is {value:g}"
        for figure, value in ratchet(row).items()
        if figure in before and value > 1.05 * before[figure]
    ]
