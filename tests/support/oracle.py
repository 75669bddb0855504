"""What the two functions must give, made from each model's own eager attention.

Every modeling file carries an eager attention function with that family's own terms (softcap,
sinks, position bias, windows). With the softmax in it replaced by σ(x − log n), n the entries that
the mask leaves, it is sigmoid attention; left alone, it is ssmax at its identity. None of our code
takes part.
"""

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor


class Replaced:
    """How often a softmax was replaced, and whether logits were shifted by their maximum before.

    A softmax does not notice the shift, a sigmoid does.
    """

    count = 0
    shifted = False


@contextlib.contextmanager
def eager(function: str) -> Iterator[Replaced]:
    """While it lasts, a model that runs "eager" computes `function` at its default per-query terms.

    A query that sees no key gets 0; a softmax over nothing but hidden keys would weigh them all.
    """
    replaced = Replaced()

    def replace(original):
        def softmax(input: Tensor, *args, dtype=None, **kwargs) -> Tensor:
            code = sys._getframe(1).f_code
            if "transformers" not in code.co_filename or "attention_forward" not in code.co_name:
                return original(input, *args, dtype=dtype, **kwargs)  # a router, a head, …
            replaced.count += 1
            visible = input > -9000.0  # hidden keys are the lowest number, −1e9 or −10000
            if function == "ssmax":
                weights = original(input, *args, dtype=dtype, **kwargs)
                return weights.masked_fill(~visible.any(-1, keepdim=True), 0.0)
            replaced.shifted |= "max" in code.co_names
            log_n = visible.sum(-1, keepdim=True).clamp(min=1).log()
            logits = input if dtype is None else input.to(dtype)
            return torch.sigmoid(logits - log_n).masked_fill(~visible, 0.0)

        return softmax

    with (
        mock.patch("torch.nn.functional.softmax", replace(torch.nn.functional.softmax)),
        mock.patch("torch.softmax", replace(torch.softmax)),
    ):
        yield replaced
