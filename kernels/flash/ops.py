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
    B, H, M, _ = query.shape
    row, intervals = row.contiguous(), intervals.contiguous()
    if logit_bias is not None:
        logit_bias = logit_bias.expand(B, H, M, key.shape[2])
    output = empty_output(query, value)
    log_sum_exp = row.new_empty(B, H, M) if function == "ssmax" else row.new_empty(0)
    max_logit = weight_sum = None
    if statistics:
        max_logit, weight_sum = row.new_empty(B, H, M), row.new_empty(B, H, M)
    if B * H * M:
        inputs = (query, key, value, row, intervals, mask, logit_bias, alibi_slopes, sinks,
                  function, scaling, softcap)  # fmt: skip
        results = (output, log_sum_exp, max_logit, weight_sum)
        with torch.cuda.device_of(query):
            if not dropout and decode.serves(query, value, function):
                decode.decode(*inputs, *results)
            else:
                prefill(*inputs, dropout, seed, *results)
    if not statistics:
        max_logit, weight_sum = row.new_empty(0), row.new_empty(0)
    return output, log_sum_exp, max_logit, weight_sum


def backward(grad_output, output, log_sum_exp, wants_logit_bias, *inputs):
    """Gradients; the contract is `hf_sigmoid.ops.define`'s."""
    with torch.cuda.device_of(grad_output):
        return _backward(grad_output, output, log_sum_exp, wants_logit_bias, *inputs)


attention = define("flash", forward, backward)
