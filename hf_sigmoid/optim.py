"""Logit control by the weights of single heads: a rate for each (QuacK), or a bound (QK-clip).

QuacK (Anson & Aitchison 2025, arXiv 2511.21377, algorithm 1): a step moves logits alike whatever
the weights' size.

    lr(W_Q^h) = τ η ‖W_K^g(h)‖₀ / ‖W_K^g(h)‖
    lr(W_K^g) = τ η max_h ‖W_Q^h‖₀ / max_h ‖W_Q^h‖          h of the group that reads key head g

η is the optimiser's rate, ‖·‖ the Frobenius norm of a head's block, ‖·‖₀ that norm when `QuacK` was
made. The paper has as many key heads as query heads; the maximum over a group is ours, after its
maximum over heads for latent attention (algorithm 2), which is here as well.

QK-clip (Kimi K2, Kimi Team 2025, arXiv 2507.20534, algorithm 1): after a step no logit that it saw
is above T.

    γ_h = min(1, T / S_h)       W_Q^h ← γ_h / κ_g W_Q^h       W_K^g ← κ_g W_K^g
    κ_g = max_h γ_h^(1−α)       h of the group; γ_h^α and γ_h^(1−α) where key heads are not shared
"""

import torch
from torch import Tensor

from hf_sigmoid.blocks import Heads, find_heads
from hf_sigmoid.recorder import all_reduce_max
from hf_sigmoid.shards import Rows

__all__ = ["RULES", "Heads", "QKClip", "QuacK", "find_heads"]

RULES = ("quack", "constant")


class QuacK:
    """Scale the updates that an optimiser makes to a model's W_Q and W_K.

    The rows of one projection get different rates, which parameter groups cannot express, and
    scaling gradients does nothing under Adam. So the update is scaled: W ← W_old + lr/η · (W_new −
    W_old), of any optimiser of torch, its decoupled weight decay included; biases as their rows.

    Args:
        optimizer: any optimiser of torch over the model's parameters; it gets two step hooks.
        heads: `find_heads` of the model, before its weights are split. Construct, save and step on
            every process.
        tau: τ.
        rule: "quack" as above, or "constant": τ η for all of them, the paper's baseline.

    Raises:
        ValueError: a rule that there is not, τ that is not positive, query and key projections of
            which none trains (as with adapters alone), or a head whose weights are all zero.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        heads: Heads,
        *,
        tau: float = 1.0,
        rule: str = "quack",
    ):
        if rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
        if not tau > 0:
            raise ValueError(f"tau must be positive, got {tau}")
        self.tau, self.rule = tau, rule
        self._rows = Rows(heads)
        self._rows.refresh()
        # accelerate's wrapper has no hooks of its own.
        optimizer = getattr(optimizer, "optimizer", optimizer)
        trained = _trained(optimizer)
        if not any(id(m.projection.weight) in trained for m in self._rows.matrices):
            raise ValueError(
                f"{type(heads.model).__name__}: expected query and key projections that the "
                "optimiser trains, got none (adapters beside frozen projections are not covered)"
            )
        self._initial = self._now()  # [places]
        if not self._initial.isfinite().all():
            raise ValueError(
                f"{type(heads.model).__name__}: expected weights other than zero in every head of "
                "its query and key projections, the rule divides by their norms"
            )
        self._last = self._initial.new_full((1,), tau)
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._keep),
            optimizer.register_step_post_hook(self._scale),
        ]

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest lr/η of the last step."""
        return self._last.min().item(), self._last.max().item()

    def multipliers(self) -> dict[str, dict[str, Tensor]]:
        """lr/η of each head, by attention module and matrix, for the weights as they are."""
        self._rows.refresh()
        return self._rows.per_matrix(self._multipliers())

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint must keep: without it the rule would start anew from where it is.

        Whole on every process, however the weights are split.
        """
        return {
            f"{name}.{key}": factor.clone()
            for name, factors in self._rows.per_matrix(self._initial.cpu()).items()
            for key, factor in factors.items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Raises ValueError for the state of another model."""
        expected = self.state_dict()
        shapes = [{key: t.shape for key, t in each.items()} for each in (expected, state)]
        if shapes[0] != shapes[1]:
            raise ValueError("the state must be of a model with the same attention modules")
        self._initial = torch.cat([state[key] for key in expected]).to(self._initial)

    def remove(self) -> None:
        """Leave the optimiser as it was."""
        for hook in self._hooks:
            hook.remove()

    def _now(self) -> Tensor:
        """What each rate is proportional to, `[places]`, for the weights as they are."""
        norms = self._rows.per_matrix(self._rows.sums().sqrt()).values()
        factors = [(_factors(block), list(block)) for block in norms]
        return torch.cat([found[key] for found, keys in factors for key in keys])

    def _multipliers(self) -> Tensor:
        if self.rule == "constant":
            return torch.full_like(self._initial, self.tau)
        now = self._now()
        return self.tau * now / self._initial.to(now.device)

    @torch.no_grad()
    def _keep(self, optimizer, args, kwargs) -> None:
        """Before a step: rates from the weights as they are, and a copy of these."""
        trained = _trained(optimizer)
        self._rows.refresh()
        self._last = self._multipliers()
        self._before = [
            (here, here.clone(), share)
            for parameter, here, share in self._rows.spread(self._last)
            if id(parameter) in trained
        ]

    @torch.no_grad()
    def _scale(self, optimizer, args, kwargs) -> None:
        """After it: as much of the update as the rates say."""
        for here, old, share in self._before:
            wide = torch.promote_types(here.dtype, share.dtype)
            here.copy_(torch.lerp(old.to(wide), here.to(wide), share.to(wide)))
        self._before = []


def _trained(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _factors(norms: dict[str, Tensor]) -> dict[str, Tensor]:
    """What each rate is proportional to, from the norms of a module's matrices."""
    if "query" in norms:
        query, key = norms["query"], norms["key"]
        group = len(query) // len(key)
        return {
            "query": 1 / key.repeat_interleave(group),
            "key": 1 / query.view(len(key), group).amax(1),
        }
    uq, qr, dkv, kr, uk = (norms[key] for key in ("uq", "qr", "dkv", "kr", "uk"))
    dq = norms.get("dq", torch.ones_like(dkv))  # queries that are not latent
    both = (uq * uk).max()
    factors = {
        "uq": 1 / (dq * uk * dkv),
        "uk": 1 / (uq * dq * dkv),
        "qr": (1 / (dq * kr)).expand_as(qr),
        "dkv": 1 / (both * dq),
        "kr": 1 / (qr.max() * dq),
    }
    if "dq" in norms:
        factors["dq"] = torch.minimum(1 / (both * dkv), 1 / (qr.max() * kr))
    return factors


class QKClip:
    """Scale W_Q and W_K down after a step, head by head, where a logit went above a threshold.

    A key head that several query heads read shrinks only as much as all of them need, and each
    query head by the rest of its γ: every head's logits are multiplied by its own γ exactly, those
    of a head below the threshold not at all, and no weight grows. (Megatron multiplies a whole
    group by its least γ.) Of latent attention W_uq^h and W_uk^h get γ^α and γ^(1−α), W_qr^h γ, and
    W_kr, which all heads share, stays. Biases are scaled with their rows.

    The threshold is of z, the product without sigmoid's bias or SSMax's multiplier
    (`Recorder.max_logits()`): z is what these weights make, γ z + b would be neither γ (z + b) nor
    bounded by the same rule, and row numbers have a learning rate of their own. A soft cap's z is
    below the cap anyway.

    Args:
        heads: `find_heads` of the model.
        threshold: T.
        alpha: the query's share of γ, in [0, 1].

    Raises:
        ValueError: a threshold that is not positive, α outside of [0, 1], or modules that norm
            their queries or keys, whose logits do not follow these weights.
    """

    def __init__(self, heads: Heads, *, threshold: float = 100.0, alpha: float = 0.5):
        if not threshold > 0:
            raise ValueError(f"threshold must be positive, got {threshold}")
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha must be in [0, 1], got {alpha}")
        if heads.normed:
            raise ValueError(
                f"{heads.normed[0]} norms its queries or keys: its logits do not follow the "
                "projections' weights, and clipping these would do nothing"
            )
        self.threshold, self.alpha = threshold, alpha
        self._rows = Rows(heads)

    @torch.no_grad()
    def clip(self, max_logits: dict[str, Tensor]) -> int:
        """Apply the rule to the weights as they are; the number of heads above the threshold.

        Collective: the largest logits of all processes decide, so that replicas stay alike.

        Args:
            max_logits: `[H]` by attention module, of the step's forward passes. A module that is
                not named is left alone, and a head without a positive number.

        Raises:
            ValueError: a name that is no attention module of the heads, or another number of heads.
        """
        blocks = self._rows.heads.blocks
        if unknown := sorted(max_logits.keys() - blocks.keys()):
            raise ValueError(f"{unknown[0]}: expected an attention module of {sorted(blocks)}")
        for name, logits in max_logits.items():
            block = blocks[name]
            heads = (block["query"] if "query" in block else block["uq"]).heads
            if logits.shape != (heads,):
                raise ValueError(f"{name}: expected {[heads]} logits, got {list(logits.shape)}")
        largest = all_reduce_max(max_logits)
        gammas = {
            # Comparisons are false of NaN; ∞ would erase the head.
            name: torch.where((s > self.threshold) & s.isfinite(), self.threshold / s, 1.0)
            for name, s in largest.items()
        }
        clipped = sum((gamma < 1).sum() for gamma in gammas.values())
        if not (clipped := int(clipped)):
            return 0
        self._rows.refresh()
        factors = []
        for name, block in blocks.items():
            known = self._factors(block, gammas[name]) if name in gammas else {}
            for key, matrix in block.items():
                default = torch.ones(matrix.heads)
                factors.append(known.get(key, default).to(next(iter(gammas.values()))))
        for _, here, factor in self._rows.spread(torch.cat(factors)):
            here.mul_(factor)
        return clipped

    def _factors(self, block: dict, gamma: Tensor) -> dict[str, Tensor]:
        if "query" not in block:
            return {"uq": gamma**self.alpha, "uk": gamma ** (1 - self.alpha), "qr": gamma}
        groups = block["key"].heads
        kappa = gamma.view(groups, -1).amax(1) ** (1 - self.alpha)
        return {"query": gamma / kappa.repeat_interleave(len(gamma) // groups), "key": kappa}
