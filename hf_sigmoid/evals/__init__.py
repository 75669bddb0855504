"""Long-context evaluation: tasks in prompts of exactly L tokens, and exact statistics.

    builder = PromptBuilder(tokenizer)
    sample = builder.build("multikey:8", length=4096, depth=0.5, seed=0, index=0)
    low, high = clopper_pearson(successes, trials)

`specs.py` lists the tasks and RULER's names of them, `prompts.py` says how a prompt is built,
`intervals.py` and `curves.py` hold the statistics: none of these needs a model, or torch. What
runs models begins at `commands.py`, `run.py` and `scoring.py`.
"""

from hf_sigmoid.evals.curves import Band, block_bootstrap, log_edges
from hf_sigmoid.evals.intervals import Paired, clopper_pearson, effective_length, mcnemar
from hf_sigmoid.evals.prompts import PromptBuilder
from hf_sigmoid.evals.samples import Needle, Sample
from hf_sigmoid.evals.specs import KINDS, RULER, Spec, parse

__all__ = [
    "KINDS", "RULER", "Band", "Needle", "Paired", "PromptBuilder", "Sample", "Spec",
    "block_bootstrap", "clopper_pearson", "effective_length", "log_edges", "mcnemar", "parse",
]  # fmt: skip
