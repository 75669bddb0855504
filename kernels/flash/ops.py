"""The Triton kernels as a differentiable operator, `torch.ops.hf_sigmoid.flash_forward`."""

import torch
from torch import Tensor

from hf_sigmoid.kernels.flash import decode
from hf_sigmoid.kernels.flash.backward import backward as _backward
from hf_sigmoid.kernels.flash.forward import prefill
from hf_sigmoid.ops import define, empty_output


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: Tensor,
    intervals: Tensor,
    mask: Tensor | None,
    logit_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    function: str,
    scaling: float,
    softcap: float,
    dropout: float,
    seed: int,
    statistics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and statistics; the contract is `hf_sigmoid.ops.define`'s."""
    _refuse_dropout(dropout)
    B, H, M, _ = query.shape
    output = empty_output(query, value)
    log_sum_exp = row.new_empty(B, H, M) if function == "ssmax" else row.new_empty(0)
    max_logit = weight_sum = None
    if statistics:
        max_logit, weight_sum = row.new_empty(B, H, M), row.new_empty(B, H, M)
    if B * H * M:
        launch = decode.decode if decode.serves(query, key) else prefill
        with torch.cuda.device_of(query):
            launch(query, key, value, row, intervals, mask, logit_bias, alibi_slopes, sinks,
                   function, scaling, softcap, output, log_sum_exp, max_logit,
                   weight_sum)  # fmt: skip
    if not statistics:
        max_logit, weight_sum = row.new_empty(0), row.new_empty(0)
    return output, log_sum_exp, max_logit, weight_sum


def backward(grad_output, output, log_sum_exp, wants_logit_bias, *inputs):
    """Gradients; the contract is `hf_sigmoid.ops.define`'s."""
    *inputs, dropout, _seed = inputs
    _refuse_dropout(dropout)
    with torch.cuda.device_of(grad_output):
        return _backward(grad_output, output, log_sum_exp, wants_logit_bias, *inputs)


def _refuse_dropout(dropout: float) -> None:
    if dropout:
        raise ValueError(f"the Triton kernels have no dropout: expected dropout=0.0, got {dropout}")


attention = define("flash", forward, backward)
