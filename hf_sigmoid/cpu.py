"""Both attention functions on any device without Triton: blocks of query rows, O(block·N) memory.

A block of rows computes its logits only over the keys that some row of it sees, so a causal mask
costs half of a full one. The backward pass recomputes the weights block by block; nothing of size
M·N is kept.
Equations: `reference.py`; arguments: `ops.py`. With P = σ(x) or softmax(x), dP = dO Vᵀ:

    sigmoid   dx = P (1 − P) dP             db = Σ_n dx        dz = dx           x = z + b
    ssmax     dx = P (dP − Σ_n P dP)        dc = Σ_n dx z      dz = c dx         x = c z
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_sigmoid import ops

# Logits a block holds: 1 MiB in float32, so that its handful of temporaries stays in a core's cache
# and a causal block ends near its diagonal.
BLOCK_ELEMENTS = 1 << 18
LEAST_ROWS = 64  # fewer rows a block would spend the time on reading keys


def forward(query, key, value, row, intervals, mask, logit_bias, alibi_slopes, sinks,
            function, scaling, softcap, dropout, seed):  # fmt: skip
    """Output and log-sum-exp, as `ops.define` asks."""
    problem = _Problem(query, key, value, row, intervals, mask, logit_bias, alibi_slopes, sinks,
                       function, scaling, softcap, dropout, seed)  # fmt: skip
    output = ops.empty_output(query, value)
    sums = row.new_empty(0) if function == "sigmoid" else row.new_empty(query.shape[:3])
    for block in problem.blocks():
        weights, log_sum_exp, _, _ = problem.weights(*block)
        rows, columns = block
        kept = weights * problem.kept(*block) if dropout else weights
        output[:, :, rows] = problem.per_head(
            problem.per_group(kept) @ problem.value[:, :, columns]
        )
        if function == "ssmax":
            sums[:, :, rows] = log_sum_exp
    return output, sums


def backward(grad_output, output, log_sum_exp, wants_logit_bias, query, key, value, row, intervals,
             mask, logit_bias, alibi_slopes, sinks, function, scaling, softcap, dropout,
             seed):  # fmt: skip
    """Gradients of query, key, value, row, logit_bias, slopes and sinks, as `ops.define` asks."""
    problem = _Problem(query, key, value, row, intervals, mask, logit_bias, alibi_slopes, sinks,
                       function, scaling, softcap, dropout, seed)  # fmt: skip
    dq, dk, dv = (row.new_zeros(tensor.shape) for tensor in (query, key, value))
    drow = row.new_zeros(query.shape[:3])
    dlogit_bias = row.new_zeros(logit_bias.shape if wants_logit_bias else 0)
    dslopes = row.new_zeros(alibi_slopes.shape if alibi_slopes is not None else 0)
    dsinks = row.new_zeros(sinks.shape if sinks is not None else 0)

    for block in problem.blocks():
        rows, columns = block
        p, sums, z, slope_of_cap = problem.weights(*block)
        k, v = problem.key[:, :, columns], problem.value[:, :, columns]
        do = problem.per_group(grad_output[:, :, rows].to(row.dtype))
        dp = problem.per_head(do @ v.transpose(2, 3))
        kept = p
        if dropout:
            keep = problem.kept(*block)
            kept, dp = p * keep, dp * keep
        dv[:, :, columns] += problem.per_group(kept).transpose(2, 3) @ do

        if function == "sigmoid":
            dz = p * (1 - p) * dp
            drow[:, :, rows] = dz.sum(-1)
        else:
            delta = (p * dp).sum(-1, keepdim=True)
            dx = p * (dp - delta)
            drow[:, :, rows] = (dx * z).sum(-1)
            dz = dx * row[:, :, rows, None]
            if sinks is not None:
                share = torch.exp(sinks.view(1, -1, 1) - sums)
                dsinks -= (share * delta.squeeze(-1)).sum((0, 2))
        if wants_logit_bias:
            dlogit_bias[:, :, rows, columns] = dz
        if alibi_slopes is not None:
            dslopes -= (dz * problem.distance(*block)).sum((2, 3))
        if softcap:
            dz = dz * slope_of_cap
        dz = problem.per_group(dz) * scaling
        dq[:, :, rows] = problem.per_head(dz @ k)
        dk[:, :, columns] += dz.transpose(2, 3) @ problem.per_group(problem.query[:, :, rows])

    return (
        dq.to(query.dtype),
        dk.to(key.dtype),
        dv.to(value.dtype),
        drow,
        dlogit_bias,
        dslopes,
        dsinks,
    )


class _Problem:
    """One call's arguments in computing dtype, and what both passes need of a block."""

    def __init__(self, query, key, value, row, intervals, mask, logit_bias, alibi_slopes, sinks,
                 function, scaling, softcap, dropout, seed):  # fmt: skip
        self.query, self.key, self.value = (tensor.to(row.dtype) for tensor in (query, key, value))
        self.row, self.intervals, self.mask = row, intervals, mask
        self.logit_bias, self.alibi_slopes, self.sinks = logit_bias, alibi_slopes, sinks
        self.function, self.scaling, self.softcap = function, scaling, softcap
        self.dropout, self.seed = dropout, seed
        self.B, self.H, self.M, _ = query.shape
        self.G, self.N = key.shape[1:3]

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Rows, and the keys that any of them sees; rows that see nothing get one hidden key."""
        if not self.B:
            return
        step = max(LEAST_ROWS, BLOCK_ELEMENTS // max(1, self.B * self.H * self.N))
        for start in range(0, self.M, step):
            rows = slice(start, min(start + step, self.M))
            lo, hi = self.intervals[:, rows].unbind(-1)
            seen = hi > lo
            first = int(torch.where(seen, lo, self.N).amin()) if self.N else 0
            last = int(torch.where(seen, hi, 0).amax()) if self.N else 0
            yield rows, slice(min(first, last), last)

    def per_group(self, tensor: Tensor) -> Tensor:
        """[B, H, m, X] -> [B, G, H/G·m, X], so that a group's heads share one matrix product."""
        _, _, m, X = tensor.shape
        return tensor.reshape(self.B, self.G, self.H // self.G * m, X)

    def per_head(self, tensor: Tensor) -> Tensor:
        """[B, G, H/G·m, X] -> [B, H, m, X]."""
        _, _, m, X = tensor.shape
        return tensor.reshape(self.B, self.H, self.G * m // self.H, X)

    def distance(self, rows: slice, columns: slice) -> Tensor:
        """|m + N − M − n| of a block."""
        at = torch.arange(rows.start, rows.stop, device=self.row.device)[:, None] + (
            self.N - self.M
        )
        return (at - torch.arange(columns.start, columns.stop, device=self.row.device)).abs()

    def weights(
        self, rows: slice, columns: slice
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Weights, log-sum-exp (ssmax), logits z, and dz/d(τ q·k) where there is a soft cap."""
        k = self.key[:, :, columns]
        z = self.per_head(self.per_group(self.query[:, :, rows] * self.scaling) @ k.transpose(2, 3))
        slope_of_cap = None
        if self.softcap:
            tanh = torch.tanh(z / self.softcap)
            z, slope_of_cap = self.softcap * tanh, 1 - tanh * tanh
        if self.alibi_slopes is not None:
            z = z - self.alibi_slopes[:, :, None, None] * self.distance(rows, columns)
        if self.logit_bias is not None:
            z = z + self.logit_bias[:, :, rows, columns]
        hidden = self._hidden(rows, columns)
        row = self.row[:, :, rows, None]
        if self.function == "sigmoid":
            p = torch.sigmoid_(z + row)
            return p if hidden is None else p.masked_fill_(hidden, 0.0), None, z, slope_of_cap

        x = z * row
        if hidden is not None:
            x = x.masked_fill_(hidden, float("-inf"))
        sink = None if self.sinks is None else self.sinks.view(1, -1, 1, 1).expand(*x.shape[:3], 1)
        largest = (
            x.amax(-1, keepdim=True) if x.shape[-1] else row.new_full(row.shape, float("-inf"))
        )
        largest = largest if sink is None else torch.maximum(largest, sink)
        largest = largest.masked_fill(largest == float("-inf"), 0.0)
        p = torch.exp_(x.sub_(largest))
        total = p.sum(-1, keepdim=True)
        total = total if sink is None else total + torch.exp(sink - largest)
        log_sum_exp = (largest + torch.log(total)).squeeze(-1)
        return p.div_(total.masked_fill(total == 0, 1.0)), log_sum_exp, z, slope_of_cap

    def kept(self, rows: slice, columns: slice) -> Tensor:
        """0 or 1/(1 − dropout) for each weight of a block, the same in both passes."""
        generator = torch.Generator(self.row.device).manual_seed(self.seed + rows.start)
        shape = (self.B, self.H, rows.stop - rows.start, columns.stop - columns.start)
        draw = torch.rand(shape, generator=generator, device=self.row.device)
        return (draw >= self.dropout).to(self.row.dtype) / (1 - self.dropout)

    def _hidden(self, rows: slice, columns: slice) -> Tensor | None:
        """Hidden keys of a block, bool broadcastable to [B, H, m, n]; None if all are seen."""
        lo, hi = self.intervals[:, rows].unbind(-1)
        hidden = None
        if bool((lo > columns.start).any()) or bool((hi < columns.stop).any()):
            at = torch.arange(columns.start, columns.stop, device=self.row.device)
            hidden = ((at < lo[..., None]) | (at >= hi[..., None]))[:, None]
        if self.mask is not None:
            unmasked = ~self.mask[:, :, rows, columns]
            hidden = unmasked if hidden is None else hidden | unmasked
        return hidden


attention = ops.define("blocked", forward, backward)
