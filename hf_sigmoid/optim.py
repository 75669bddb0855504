"""Logit control: a learning rate for every head of W_Q and W_K, so that a step moves logits alike
whatever the weights' size.

    lr(W_Q^h) = τ η ‖W_K^g(h)‖₀ / ‖W_K^g(h)‖
    lr(W_K^g) = τ η max_h ‖W_Q^h‖₀ / max_h ‖W_Q^h‖          h of the group that reads key head g

QuacK (Anson & Aitchison 2025, arXiv 2511.21377, algorithm 1): η is the optimiser's rate, ‖·‖ the
Frobenius norm of a head's block, ‖·‖₀ that norm when `QuacK` was made. The paper has as many key
heads as query heads; the maximum over a group is ours, after its maximum over heads for latent
attention (algorithm 2), which is here as well.

The rows of one projection get different rates, which parameter groups cannot express, and scaling
gradients does nothing under Adam. So the update is scaled: W ← W_old + lr/η · (W_new − W_old), of
any optimiser of torch, its decoupled weight decay included.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_sigmoid import parameters
from hf_sigmoid.heads import one_call, written_by

RULES = ("quack", "constant")
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm")


@dataclass
class Matrix:
    """The heads' blocks in one projection."""

    projection: nn.Module
    head: Tensor  # of each output feature, −1: of none
    heads: int

    @property
    def dimension(self) -> int:
        """Of the output features in the weight."""
        return int(isinstance(self.projection, Conv1D))

    def norms(self) -> Tensor:
        """Frobenius norm of each head's block, `[heads]`, float32."""
        weight = self.projection.weight.detach()
        squares = weight.float().square().sum(1 - self.dimension)
        known = self.head.to(squares.device)
        sums = squares.new_zeros(self.heads + 1).index_add_(0, known + 1, squares)
        return sums[1:].sqrt()


class QuacK:
    """Scale the updates that an optimiser makes to a model's W_Q and W_K.

    Args:
        optimizer: any optimiser of torch over the model's parameters; it gets two step hooks.
        model: its attention modules' query and key projections are found by running it.
        ids: some token ids `[1, T]` to find them with.
        tau: τ.
        rule: "quack" as above, or "constant": τ η for all of them, the paper's baseline.

    Raises:
        ValueError: a rule that there is not, τ that is not positive, a model in which no query or
            key projection is found or trains (as with adapters alone), or whose weights are split
            over processes.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: PreTrainedModel,
        ids: Tensor,
        *,
        tau: float = 1.0,
        rule: str = "quack",
    ):
        if rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
        if not tau > 0:
            raise ValueError(f"tau must be positive, got {tau}")
        self.tau, self.rule = tau, rule
        self.blocks = _find(model, ids)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        matrices = [matrix for block in self.blocks.values() for matrix in block.values()]
        if not any(id(matrix.projection.weight) in trained for matrix in matrices):
            raise ValueError(
                f"{type(model).__name__}: expected query and key projections that the optimiser "
                "trains, got none (adapters beside frozen projections are not covered)"
            )
        self._trained = trained
        self.initial = {name: _factors(_norms(block)) for name, block in self.blocks.items()}
        self.range = (tau, tau)  # the least and the largest lr/η of the last step
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._keep),
            optimizer.register_step_post_hook(self._scale),
        ]

    def multipliers(self) -> dict[str, dict[str, Tensor]]:
        """lr/η of each head, by attention module and matrix, for the weights as they are."""
        result: dict[str, dict[str, Tensor]] = {}
        for name, block in self.blocks.items():
            factors = _factors(_norms(block))
            result[name] = {
                key: torch.full_like(factor, self.tau)
                if self.rule == "constant"
                else self.tau * factor / self.initial[name][key].to(factor.device)
                for key, factor in factors.items()
            }
        return result

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint must keep: without it the rule would start anew from where it is."""
        return {
            f"{name}.{key}": factor.cpu()
            for name, factors in self.initial.items()
            for key, factor in factors.items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Raises ValueError for the state of another model."""
        expected = self.state_dict()
        shapes = [{key: t.shape for key, t in each.items()} for each in (expected, state)]
        if shapes[0] != shapes[1]:
            raise ValueError("the state must be of a model with the same attention modules")
        for name, factors in self.initial.items():
            for key in factors:
                factors[key] = state[f"{name}.{key}"].clone()

    def remove(self) -> None:
        """Leave the optimiser as it was."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _keep(self, optimizer, args, kwargs) -> None:
        """Before a step: rates from the weights as they are, and a copy of these."""
        vectors: dict[nn.Module, Tensor] = {}
        found = self.multipliers()
        each = torch.cat([m.flatten() for block in found.values() for m in block.values()])
        self.range = (each.min().item(), each.max().item())
        for name, multipliers in found.items():
            for key, multiplier in multipliers.items():
                matrix = self.blocks[name][key]
                features = matrix.head.to(multiplier.device)
                vector = vectors.setdefault(matrix.projection, multiplier.new_ones(features.shape))
                mine = features >= 0
                vector[mine] = multiplier[features[mine]]
        self._before = []
        for projection, vector in vectors.items():
            dimension = int(isinstance(projection, Conv1D))
            for parameter, axis in ((projection.weight, dimension), (projection.bias, 0)):
                if parameter is not None and id(parameter) in self._trained:
                    shape = [1] * parameter.dim()
                    shape[axis] = -1
                    self._before.append((parameter, parameter.clone(), vector.view(shape)))

    @torch.no_grad()
    def _scale(self, optimizer, args, kwargs) -> None:
        """After it: as much of the update as the rates say."""
        for parameter, old, share in self._before:
            parameter.copy_(torch.lerp(old.float(), parameter.float(), share))
        self._before = []


def _find(model: PreTrainedModel, ids: Tensor) -> dict[str, dict[str, Matrix]]:
    """By attention module: its matrices; those of latent attention by their names."""
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        raise ValueError(f"{type(model).__name__}: expected whole weights, got sharded ones")
    blocks: dict[str, dict[str, Matrix]] = {}
    normed = []
    for name, module in parameters.attention_modules(model):
        if hasattr(module, "kv_a_proj_with_mqa"):
            blocks[name] = _latent(module)
            continue
        if (call := one_call(model, name, ids)) is None:
            continue
        places = [written_by(call, which)[0] for which in (0, 1)]
        if None in places:
            continue
        if any(hasattr(module, norm) for norm in NORMS):
            normed.append(name)
        blocks[name] = {
            key: _matrix(model.get_submodule(place.module), place.features)
            for key, place in zip(("query", "key"), places, strict=True)
        }
    if not blocks:
        raise ValueError(f"{type(model).__name__}: no query and key projections were found")
    if normed:
        warnings.warn(
            f"{len(normed)} attention modules norm their queries or keys ({normed[0]}, …): their "
            "logits are bounded already, and QuacK has no purpose there",
            stacklevel=3,
        )
    return blocks


def _matrix(projection: nn.Module, features: list[Tensor]) -> Matrix:
    size = projection.weight.shape[int(isinstance(projection, Conv1D))]
    head = torch.full((size,), -1)
    for number, each in enumerate(features):
        head[each.cpu()] = number
    return Matrix(projection, head, len(features))


def _latent(module: nn.Module) -> dict[str, Matrix]:
    """W_dq, W_uq, W_qr, W_dkv, W_kr and W_uk of DeepSeek's attention."""
    nope, rope, rank = module.qk_nope_head_dim, module.qk_rope_head_dim, module.kv_lora_rank
    heads = parameters.head_count(module)
    up = getattr(module, "q_b_proj", None) or module.q_proj
    down, kv = module.kv_a_proj_with_mqa, module.kv_b_proj

    def rows(projection, parts, chosen):
        """Features of every head whose parts have these sizes, those of the chosen part."""
        start = sum(parts[:chosen])
        each = torch.arange(projection.out_features).view(-1, sum(parts))
        return _matrix(projection, list(each[:, start : start + parts[chosen]]))

    value = kv.out_features // heads - nope
    matrices = {
        "uq": rows(up, (nope, rope), 0), "qr": rows(up, (nope, rope), 1),
        "dkv": rows(down, (rank, rope), 0), "kr": rows(down, (rank, rope), 1),
        "uk": rows(kv, (nope, value), 0),
    }  # fmt: skip
    if up is not getattr(module, "q_proj", None):
        narrow = module.q_a_proj
        matrices["dq"] = rows(narrow, (narrow.out_features,), 0)
    return matrices


def _norms(block: dict[str, Matrix]) -> dict[str, Tensor]:
    return {key: matrix.norms() for key, matrix in block.items()}


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
