"""One model type in a worker process: both rows, and nothing on the terminal."""

import contextlib
import io
import logging
import warnings
from dataclasses import asdict

FUNCTIONS = ("sigmoid", "ssmax")


def examine(model_type: str) -> list[dict]:
    """The rows of one model type."""
    import torch
    import transformers

    from support import checks

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return [asdict(checks.examine(model_type, function)) for function in FUNCTIONS]
