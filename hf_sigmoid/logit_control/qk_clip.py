"""QK-clip, a bound for each head: after a step no logit that it saw is above T.

Algorithm 1 of Kimi K2 (Kimi Team 2025, arXiv 2507.20534):

    γ_h = min(1, T / S_h)       W_Q^h ← γ_h / κ_g W_Q^h       W_K^g ← κ_g W_K^g
    κ_g = max_h γ_h^(1−α)       h of the group; γ_h^α and γ_h^(1−α) where key heads are not shared
"""

import torch
from torch import Tensor

from hf_sigmoid.logit_control.blocks import Heads
from hf_sigmoid.logit_control.recorder import all_reduce_max
from hf_sigmoid.logit_control.shards import Rows


class QKClip:
    """Scale W_Q and W_K down after a step, head by head, where a logit went above a threshold.

    A key head that several query heads read shrinks only as much as all of them need, and each
    query head by the rest of its γ: every head's logits are multiplied by its own γ exactly, those
    of a head below the threshold not at all, and no weight grows. (Megatron multiplies a whole
    group by its least γ.) Of latent attention W_uq^h and W_uk^h get γ^α and γ^(1−α), W_qr^h γ, and
    W_kr, which all heads share, stays. Biases are scaled with their rows.

    The threshold is of z, the product without sigmoid's bias or SSMax's multiplier
    (`Recorder.max_logits()`): z is what these weights make, γ z + b would be neither γ (z + b) nor
    bounded by the same rule, and per-query terms have a learning rate of their own. A soft cap's z
    is below the cap anyway.

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
