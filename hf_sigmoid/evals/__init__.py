"""Long-context evaluation: tasks in prompts of exactly L tokens, and exact statistics.

    builder = PromptBuilder(tokenizer)
    sample = builder.build("multikey:8", length=4096, depth=0.5, seed=0, index=0)
    low, high = clopper_pearson(successes, trials)

`templates.py` lists the tasks and RULER's names of them, `prompts.py` says how a prompt is built,
`statistics.py` holds the statistics: none of these needs a model, or torch. `probe.py` asks a
model in memory; the command begins at `commands.py` and `run.py`.
"""

from hf_sigmoid.evals.prompts import PromptBuilder
from hf_sigmoid.evals.samples import Needle, Sample
from hf_sigmoid.evals.statistics import (
    Band,
    Paired,
    block_bootstrap,
    clopper_pearson,
    effective_length,
    log_edges,
    mcnemar,
)
from hf_sigmoid.evals.templates import KINDS, RULER, Spec, parse

__all__ = [
    "KINDS", "RULER", "Band", "Needle", "Paired", "PromptBuilder", "Sample", "Spec",
    "block_bootstrap", "clopper_pearson", "effective_length", "log_edges", "mcnemar", "parse",
]  # fmt: skip
