"""QuacK, a learning rate for each head: a step moves logits alike whatever the weights' size.

Algorithm 1 of Anson & Aitchison 2025, arXiv 2511.21377:

    lr(W_Q^h) = τ η ‖W_K^g(h)‖₀ / ‖W_K^g(h)‖
    lr(W_K^g) = τ η max_h ‖W_Q^h‖₀ / max_h ‖W_Q^h‖          h of the group that reads key head g

η is the optimiser's rate, ‖·‖ the Frobenius norm of a head's block, ‖·‖₀ that norm when `QuacK` was
made. The paper has as many key heads as query heads; the maximum over a group is ours, after its
maximum over heads for latent attention (algorithm 2), which is here as well.
"""

import torch
from torch import Tensor

from hf_sigmoid.logit_control.blocks import Heads
from hf_sigmoid.logit_control.shards import Rows

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
            optimizer.register_step_pre_hook(self.keep),
            optimizer.register_step_post_hook(self.scale),
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
        """The reference norms: without them in a checkpoint the rule would start anew from there.

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
        """The factors that rates are proportional to, `[places]`, for the weights as they are."""
        norms = self._rows.per_matrix(self._rows.sums().sqrt()).values()
        factors = [(_factors(block), list(block)) for block in norms]
        return torch.cat([found[key] for found, keys in factors for key in keys])

    def _multipliers(self) -> Tensor:
        if self.rule == "constant":
            return torch.full_like(self._initial, self.tau)
        now = self._now()
        return self.tau * now / self._initial.to(now.device)

    @torch.no_grad()
    def keep(self, optimizer, args=(), kwargs=None) -> None:
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
    def scale(self, optimizer, args=(), kwargs=None) -> None:
        """After it: as much of the update as the rates say."""
        for here, old, share in self._before:
            wide = torch.promote_types(here.dtype, share.dtype)
            here.copy_(torch.lerp(old.to(wide), here.to(wide), share.to(wide)))
        self._before = []


def _trained(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _factors(norms: dict[str, Tensor]) -> dict[str, Tensor]:
    """The factors that rates are proportional to, from the norms of a module's matrices."""
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
