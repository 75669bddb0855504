"""Both attention functions on any device without Triton: tiles of queries and keys.

A tile's weights lie in memory as [keys, queries], so that every large matrix product has long rows;
keys are read as they are, queries are copied. Memory is O(block·N), nothing of size M·N is kept:
the backward pass recomputes the weights tile by tile. Keys that no query of a block sees are never
read. Sigmoid's weights need no normalisation, so its tiles are small enough for a core's cache;
ssmax's tile is as long as the keys that its queries see.

Equations: `reference.py`; arguments: `ops.py`. With P = σ(x) or softmax(x), dP = dO Vᵀ:

    sigmoid   dx = P (1 − P) dP             db = Σ_n dx        dz = dx           x = z + b
    ssmax     dx = P (dP − Σ_n P dP)        dc = Σ_n dx z      dz = c dx         x = c z
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_sigmoid import compiled, ops

# Weights a tile holds: 2 MiB in float32, so that they stay in the cores' caches between the two
# matrix products, and are worth the threads' waiting for each other.
BLOCK_ELEMENTS = 1 << 19
LEAST_ROWS = 64  # fewer columns a block would spend the time on reading keys
MOST_ROWS = 128  # more would compute too much beyond a causal diagonal
LEAST_KEYS = 128  # and fewer keys a tile on starting matrix products


def forward(query, key, value, row, intervals, mask, logit_bias, alibi_slopes, sinks,
            function, scaling, softcap, dropout, seed, statistics):  # fmt: skip
    """Output, log-sum-exp, largest logits and sums of weights, as `ops.define` asks."""
    problem = _Problem(query, key, value, row, intervals, mask, logit_bias, alibi_slopes, sinks,
                       function, scaling, softcap, dropout, seed)  # fmt: skip
    output = ops.empty_output(query, value)
    sums = row.new_empty(0) if function == "sigmoid" else row.new_empty(query.shape[:3])
    tops = row.new_full(query.shape[:3] if statistics else (0,), -math.inf)
    weight_sums = torch.zeros_like(tops)
    across_values = problem.across(problem.value)
    for block in problem.blocks():
        o = row.new_zeros(problem.batch, value.shape[-1], block.width)
        for tile in block.tiles():
            p, log_sum_exp, top, _ = block.weights(tile, statistics)
            if statistics:
                seen = tops[:, :, block.rows]
                torch.maximum(seen, block.per_head(top).squeeze(-1), out=seen)
                weight_sums[:, :, block.rows] += block.per_head(p.sum(1, keepdim=True)).squeeze(-1)
            if dropout:
                p = p * block.kept(tile)
            problem.accumulate(o, across_values[:, :, tile.keys], p)
            if function == "ssmax":
                sums[:, :, block.rows] = block.per_head(log_sum_exp).squeeze(-1)
        output[:, :, block.rows] = block.per_head(o)
    return output, sums, tops, weight_sums


def backward(grad_output, output, log_sum_exp, wants_logit_bias, query, key, value, row, intervals,
             mask, logit_bias, alibi_slopes, sinks, function, scaling, softcap, dropout,
             seed):  # fmt: skip
    """Gradients of query, key, value, row, logit_bias, slopes and sinks, as `ops.define` asks."""
    problem = _Problem(query, key, value, row, intervals, mask, logit_bias, alibi_slopes, sinks,
                       function, scaling, softcap, dropout, seed)  # fmt: skip
    D = query.shape[-1]
    dq, drow = row.new_zeros(query.shape), row.new_zeros(query.shape[:3])
    dk, dv = (row.new_zeros(problem.batch, *tensor.shape[2:]) for tensor in (key, value))
    dlogit_bias = row.new_zeros(logit_bias.shape if wants_logit_bias else (0, 0, 1, 1))
    rows_alike, keys_alike = (size == 1 for size in dlogit_bias.shape[2:])
    dslopes = row.new_zeros(alibi_slopes.shape if alibi_slopes is not None else 0)
    dsinks = row.new_zeros(sinks.shape if sinks is not None else 0)

    across_keys = problem.across(problem.key)
    for block in problem.blocks():
        do = block.per_group(grad_output)
        do_rows, q_rows = (tensor.transpose(1, 2).contiguous() for tensor in (do, block.query))
        dq_block = torch.zeros_like(block.query)
        drow_block = row.new_zeros(problem.batch, 1, block.width)
        for tile in block.tiles():
            keys = tile.keys
            p, sums, z, slope_of_cap = block.weights(tile)
            dp = problem.product("dp", problem.value[:, keys], do)
            kept = p
            if dropout:
                keep = block.kept(tile)
                kept, dp = p * keep, dp.mul_(keep)
            dv[:, keys] += torch.bmm(kept, do_rows)

            if function == "sigmoid":
                dz = torch.ops.aten.sigmoid_backward.grad_input(dp, p, grad_input=dp)
                if not problem.is_folded:
                    drow_block += dz.sum(1, keepdim=True)
            else:
                delta = (p * dp).sum(1, keepdim=True)
                dx = dp.sub_(delta).mul_(p)
                drow_block += (dx * z).sum(1, keepdim=True)
                dz = dx * block.row
                if sinks is not None:
                    share = torch.exp(sinks.view(1, -1, 1, 1) - block.per_head(sums))
                    dsinks -= (share * block.per_head(delta)).sum((0, 2, 3))
            if wants_logit_bias:
                part = dlogit_bias if rows_alike else dlogit_bias[:, :, block.rows]
                part = part if keys_alike else part[..., keys]
                part += block.per_head(dz).sum_to_size(part.shape)
            if alibi_slopes is not None:
                dslopes -= block.per_head(dz * block.distance(tile)).sum((2, 3))
            if softcap:
                dz = dz * slope_of_cap
            problem.accumulate(dq_block, across_keys[:, :, keys], dz)
            dk[:, keys] += torch.bmm(dz, q_rows[:, :, :D])
        dq[:, :, block.rows] = block.per_head(dq_block[:, :D]) * scaling
        if problem.is_folded:
            drow_block = dq_block[:, D:]
        drow[:, :, block.rows] = block.per_head(drow_block).squeeze(-1)

    return (
        dq.to(query.dtype),
        dk.view(key.shape).to(key.dtype),
        dv.view(value.shape).to(value.dtype),
        drow,
        dlogit_bias.to(logit_bias.dtype) if wants_logit_bias else row.new_empty(0),
        dslopes,
        dsinks,
    )


class _Tile:
    """A run of keys that some query of a block sees; `is_full` if every query sees all of it."""

    def __init__(self, start: int, stop: int, is_full: bool):
        self.keys, self.is_full = slice(start, stop), is_full


class _Problem:
    """One call's arguments in computing dtype; batch and key heads are one axis, `batch`."""

    def __init__(self, query, key, value, row, intervals, mask, logit_bias, alibi_slopes, sinks,
                 function, scaling, softcap, dropout, seed):  # fmt: skip
        self.B, self.H, self.M, _ = query.shape
        self.G, self.N = key.shape[1:3]
        self.R = self.H // self.G
        self.batch = self.B * self.G
        self.query, self.row = query, row
        self.key, self.value = (
            tensor.to(row.dtype).reshape(self.batch, *tensor.shape[2:]) for tensor in (key, value)
        )
        self.intervals, self.mask = intervals, mask
        self.logit_bias, self.alibi_slopes, self.sinks = logit_bias, alibi_slopes, sinks
        if logit_bias is not None:
            self.logit_bias = logit_bias.expand(self.B, self.H, self.M, self.N)
        self.function, self.scaling, self.softcap = function, scaling, softcap
        self.dropout, self.seed = dropout, seed
        self.memory = {}
        # Copies of the keys and values are soon paid for by faster products, but not in decoding.
        self.copies = self.R * self.M >= LEAST_ROWS
        # A bias is one more dimension: q' = (τq, b), k' = (k, 1); its gradient comes with dq'.
        self.is_folded = self.copies and function == "sigmoid" and not softcap
        if self.is_folded:
            self.key = torch.nn.functional.pad(self.key, (0, 1), value=1.0)

    def blocks(self) -> Iterator["_Block"]:
        keys = self.N if self.function == "ssmax" else LEAST_KEYS
        width = max(LEAST_ROWS, BLOCK_ELEMENTS // max(1, self.batch * keys))
        width = width if self.function == "ssmax" else min(width, MOST_ROWS)
        step = max(1, width // self.R)
        for start in range(0, self.M if self.batch else 0, step):
            yield _Block(self, slice(start, min(start + step, self.M)))

    def product(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """left @ right in memory that the next tile uses again: fresh pages cost as much as σ."""
        if not self.copies:  # a few columns are a few rows of the transposed product, and faster
            return torch.bmm(right.mT.contiguous(), left.mT).mT
        shape = (self.batch, left.shape[1], right.shape[2])
        size = math.prod(shape)
        if name not in self.memory or self.memory[name].numel() < size:
            self.memory[name] = self.row.new_empty(size)
        return torch.bmm(left, right, out=self.memory[name][:size].view(shape))

    def accumulate(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """total += left @ right."""
        if self.copies:
            total.baddbmm_(left, right)
        else:
            total += self.product("sum", left, right)

    def across(self, tensor: Tensor) -> Tensor:
        """[batch, N, X] -> [batch, X, N]."""
        return tensor.transpose(1, 2).contiguous() if self.copies else tensor.transpose(1, 2)


class _Block:
    """Some queries of all heads. Their `width` columns of a tile are query-major: (m, H/G)."""

    def __init__(self, problem: _Problem, rows: slice):
        self.problem, self.rows = problem, rows
        self.width = (rows.stop - rows.start) * problem.R
        self.query = self.per_group(problem.query) * problem.scaling
        self.row = self.per_group(problem.row[..., None])
        if problem.is_folded:
            self.query = torch.cat([self.query, self.row], 1)
        self.lo, self.hi = problem.intervals[:, rows].unbind(-1)

    def per_group(self, tensor: Tensor) -> Tensor:
        """[B, H, M, X] -> [batch, X, width], contiguous; floats in computing dtype."""
        p, tensor = self.problem, tensor[:, :, self.rows]
        tensor = tensor if tensor.dtype == torch.bool else tensor.to(p.row.dtype)
        tensor = tensor.unflatten(1, (p.G, p.R)).permute(0, 1, 4, 3, 2)
        return tensor.reshape(p.batch, -1, self.width).contiguous()

    def per_head(self, tensor: Tensor) -> Tensor:
        """[batch, X, width] -> [B, H, m, X]."""
        p, X = self.problem, tensor.shape[1]
        tensor = tensor.reshape(p.B, p.G, X, self.width // p.R, p.R).permute(0, 1, 4, 3, 2)
        return tensor.reshape(p.B, p.H, self.width // p.R, X)

    def tiles(self) -> Iterator[_Tile]:
        """The keys that some query sees; those that all see are tiles of their own, unmasked."""
        lo, hi, N = self.lo, self.hi, self.problem.N
        seen = hi > lo
        last = int(torch.where(seen, hi, 0).amax())
        first = min(last, int(torch.where(seen, lo, N).amin()))
        if self.problem.function == "ssmax":
            # Also if no key is seen: there may be a sink.
            is_full = first == int(lo.amax()) and last == int(hi.amin())
            yield _Tile(first, last, is_full)
            return
        start, stop = max(first, int(lo.amax())), min(last, int(hi.amin()))
        if start >= stop:
            start = stop = last
        step = max(LEAST_KEYS, BLOCK_ELEMENTS // max(1, self.problem.batch * self.width))
        for begin, end in ((first, start), (start, stop), (stop, last)):
            for at in range(begin, end, step):
                yield _Tile(at, min(at + step, end), begin == start and end == stop)

    def weights(
        self, tile: _Tile, statistics: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Weights, log-sum-exp (ssmax), logits z, and dz/d(τ q·k) where there is a soft cap.

        With `statistics` the largest final logit of each query takes the place of z.
        """
        problem, slope_of_cap = self.problem, None
        z = problem.product("z", problem.key[:, tile.keys], self.query)
        if problem.softcap:
            tanh = torch.tanh(z / problem.softcap)
            z, slope_of_cap = problem.softcap * tanh, 1 - tanh * tanh
        if problem.alibi_slopes is not None:
            slopes = self.per_group(
                problem.alibi_slopes[..., None, None].expand(-1, -1, problem.M, 1)
            )
            z = z - slopes * self.distance(tile)
        hidden = self._hidden(tile)
        if problem.logit_bias is not None:
            added = self.per_group(problem.logit_bias[..., tile.keys])
            # −∞ hides: times 0 or a negative multiplier it would be anything but hidden.
            hides = added == -math.inf
            z = (z + added).masked_fill_(hides, 0.0)
            hides = hides.unflatten(0, (problem.B, problem.G))
            hidden = hides if hidden is None else hidden | hides
        if problem.function == "sigmoid":
            x = z if problem.is_folded else z + self.row
            if statistics:
                z = self._largest(self._fill(x.clone(), hidden, -math.inf))
            return self._fill(x.sigmoid_(), hidden, 0.0), None, z, slope_of_cap

        x = self._fill(z * self.row, hidden, -math.inf)
        largest = self._largest(x)
        z = largest if statistics else z
        if problem.sinks is not None:
            sink = self.per_group(
                problem.sinks.view(1, -1, 1, 1).expand(problem.B, -1, problem.M, 1)
            )
            largest = torch.maximum(largest, sink)
        largest = largest.masked_fill(largest == float("-inf"), 0.0)
        p = x.sub_(largest).exp_()
        total = p.sum(1, keepdim=True)
        if problem.sinks is not None:
            total = total + torch.exp(sink - largest)
        p.div_(total.masked_fill(total == 0, 1.0))
        return p, largest + torch.log(total), z, slope_of_cap

    def _largest(self, x: Tensor) -> Tensor:
        """By query; −∞ of none."""
        if x.shape[1]:
            return x.amax(1, keepdim=True)
        return self.row.new_full(self.row.shape, -math.inf)

    def kept(self, tile: _Tile) -> Tensor:
        """0 or 1/(1 − dropout) for each weight of a tile, the same in both passes."""
        problem, row = self.problem, self.row
        seed = problem.seed + self.rows.start * problem.N + tile.keys.start
        generator = torch.Generator(row.device).manual_seed(seed)
        shape = (problem.batch, tile.keys.stop - tile.keys.start, self.width)
        draw = torch.rand(shape, generator=generator, device=row.device)
        return (draw >= problem.dropout).to(row.dtype) / (1 - problem.dropout)

    def distance(self, tile: _Tile) -> Tensor:
        """|m + N − M − n|, [n, width]."""
        problem, device = self.problem, self.row.device
        at = torch.arange(self.rows.start, self.rows.stop, device=device).repeat_interleave(
            problem.R
        )
        keys = torch.arange(tile.keys.start, tile.keys.stop, device=device)[:, None]
        return (at + (problem.N - problem.M) - keys).abs()

    def _hidden(self, tile: _Tile) -> Tensor | None:
        """Hidden keys of a tile, bool [B, 1 or G, n, width]; None if all are seen."""
        problem, hidden = self.problem, None
        if not tile.is_full:
            at = torch.arange(tile.keys.start, tile.keys.stop, device=self.row.device)[:, None]
            lo, hi = (
                bound.repeat_interleave(problem.R, -1)[:, None] for bound in (self.lo, self.hi)
            )
            hidden = ((at < lo) | (at >= hi))[:, None]
        if problem.mask is not None:
            unmasked = ~self.per_group(problem.mask[..., tile.keys]).unflatten(
                0, (problem.B, problem.G)
            )
            hidden = unmasked if hidden is None else hidden | unmasked
        return hidden

    def _fill(self, x: Tensor, hidden: Tensor | None, number: float) -> Tensor:
        if hidden is not None:
            x.view(self.problem.B, self.problem.G, *x.shape[1:]).masked_fill_(hidden, number)
        return x


def inference(query, key, value, row, intervals, mask, logit_bias, alibi_slopes, sinks,
              function, scaling, softcap, dropout, seed, statistics):  # fmt: skip
    """`forward`, by the compiled function where it serves."""
    terms = (mask, logit_bias, alibi_slopes, sinks)
    usual = all(term is None for term in terms) and not softcap and not dropout and not statistics
    if not usual or not compiled.serves(query, key, value):
        return forward(query, key, value, row, intervals, *terms, function, scaling, softcap,
                       dropout, seed, statistics)  # fmt: skip
    output, nothing = ops.empty_output(query, value), row.new_empty(0)
    log_sum_exp = row.new_empty(query.shape[:3]) if function == "ssmax" else nothing
    compiled.forward(query, key, value, row, intervals, function, scaling, output, log_sum_exp)
    return output, log_sum_exp, nothing, nothing


attention = ops.define("blocked", forward, backward, inference)
