"""Each head's block in a model's query and key projections: what a rule about logits acts on."""

import warnings
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_sigmoid import compat, parameters
from hf_sigmoid.logit_control.heads import one_call, written_by

# What wrappers add to the names of a model's modules: DDP, torch.compile, PEFT, checkpointing.
WRAPPERS = {
    "module", "_orig_mod", "base_layer", "_fsdp_wrapped_module", "_checkpoint_wrapped_module",
}  # fmt: skip
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm")


@dataclass
class Matrix:
    """The heads' blocks in one projection."""

    name: str  # of the projection in the model
    projection: nn.Module
    head: Tensor  # of each output feature, −1: of none
    heads: int
    holds: str  # "query", "key", or "latent": what keys and values are both made of

    @property
    def dimension(self) -> int:
        """The dimension of the output features in the weight."""
        return int(isinstance(self.projection, Conv1D))


@dataclass
class Heads:
    """The rows of projections that make each head's queries and keys.

    By attention module its matrices: `query` and `key`; or of latent attention (DeepSeek's) `dq`,
    `uq`, `qr`, `dkv`, `kr` and `uk`. Modules are kept, not their weights: what a wrapper puts in a
    weight's place later (a DTensor of FSDP2 or tensor parallelism) is what is read and written.
    """

    model: nn.Module
    blocks: dict[str, dict[str, Matrix]]
    normed: list[str] = field(default_factory=list)  # modules that norm their queries or keys

    @property
    def projections(self) -> dict[str, list[str]]:
        """Names of the weights that hold queries alone ("query") or keys alone ("key")."""
        names: dict[str, list[str]] = {"query": [], "key": []}
        for name, matrices in self._by_projection().items():
            if (only := _only(matrices)) is not None:
                names[only].append(f"{name}.weight")
        return names

    @property
    def fused(self) -> list[str]:
        """Names of the weights that hold queries or keys together with something else."""
        found = self._by_projection().items()
        return [f"{name}.weight" for name, matrices in found if _only(matrices) is None]

    def bind(self, model: nn.Module) -> "Heads":
        """The same rows of another model's modules, by their names; wrappers' parts do not count.

        Raises:
            ValueError: it lacks a projection, or has one of another size.
        """
        known = {plain_name(name): module for name, module in model.named_modules()}
        bound: dict[str, dict[str, Matrix]] = {}
        for module, block in self.blocks.items():
            for key, matrix in block.items():
                projection = known.get(plain_name(matrix.name))
                # PEFT's wrapper and what it wraps have one name here; both read the same weight.
                shape = getattr(getattr(projection, "weight", None), "shape", None)
                size = shape[matrix.dimension] if shape else None
                if size != len(matrix.head):
                    raise ValueError(
                        f"{matrix.name}: expected {len(matrix.head)} output features, got "
                        f"{'no such projection' if size is None else size}"
                    )
                bound.setdefault(module, {})[key] = replace(matrix, projection=projection)
        return Heads(model, bound, self.normed)

    def _by_projection(self) -> dict[str, list[Matrix]]:
        found: dict[str, list[Matrix]] = {}
        for block in self.blocks.values():
            for matrix in block.values():
                found.setdefault(matrix.name, []).append(matrix)
        return found


def find_heads(model: PreTrainedModel, ids: Tensor) -> Heads:
    """The rows of every head's queries and keys, by running each attention module once.

    Args:
        model: with whole weights, so before FSDP2 or tensor parallelism shards them. A model that
            is sharded as it is loaded gets the heads of a twin that has no memory:

                with torch.device("meta"):
                    twin = AutoModelForCausalLM.from_config(model.config)
                heads = find_heads(twin, ids).bind(model)
        ids: some token ids `[1, T]`.

    Raises:
        ValueError: sharded weights, or a model in which no query and key projection is found.
    """
    if compat.mesh_of(model) is not None:
        raise ValueError(
            f"{type(model).__name__}: expected whole weights, got sharded ones: find the heads "
            "before, or of a twin on the meta device, and bind them to this model"
        )
    blocks: dict[str, dict[str, Matrix]] = {}
    normed = []
    for name, module in parameters.attention_modules(model):
        if hasattr(module, "kv_a_proj_with_mqa"):
            blocks[name] = _latent(name, module)
            continue
        if (call := one_call(model, name, ids)) is None:
            continue
        places = [written_by(call, which)[0] for which in (0, 1)]
        if None in places:
            continue
        if any(hasattr(module, norm) for norm in NORMS):
            normed.append(name)
        blocks[name] = {
            key: _matrix(place.module, model.get_submodule(place.module), place.features, key)
            for key, place in zip(("query", "key"), places, strict=True)
        }
    if not blocks:
        raise ValueError(f"{type(model).__name__}: no query and key projections were found")
    if normed:
        warnings.warn(
            f"{len(normed)} attention modules norm their queries or keys ({normed[0]}, …): their "
            "logits are bounded already, and logit control has no purpose there",
            stacklevel=2,
        )
    return Heads(model, blocks, normed)


def plain_name(name: str) -> str:
    """A module's name without what wrappers add to it."""
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    return name.removeprefix("base_model.model.")


def _only(matrices: list[Matrix]) -> str | None:
    """The kind of all output features of a projection; None: they are of several."""
    kinds = {matrix.holds for matrix in matrices}
    covered = torch.stack([matrix.head >= 0 for matrix in matrices]).any(0).all()
    return kinds.pop() if covered and kinds in ({"query"}, {"key"}) else None


def _matrix(name: str, projection: nn.Module, features: list[Tensor], holds: str) -> Matrix:
    size = projection.weight.shape[int(isinstance(projection, Conv1D))]
    head = torch.full((size,), -1, device="cpu")
    for number, each in enumerate(features):
        head[each.cpu()] = number
    return Matrix(name, projection, head, len(features), holds)


def _latent(name: str, module: nn.Module) -> dict[str, Matrix]:
    """W_dq, W_uq, W_qr, W_dkv, W_kr and W_uk of DeepSeek's attention, by their names."""
    nope, rope, rank = module.qk_nope_head_dim, module.qk_rope_head_dim, module.kv_lora_rank
    heads = parameters.head_count(module)
    up = "q_proj" if getattr(module, "q_b_proj", None) is None else "q_b_proj"

    def rows(child, parts, chosen, holds):
        """Features of every head whose parts have these sizes, those of the chosen part."""
        projection = module.get_submodule(child)
        start = sum(parts[:chosen])
        size = projection.weight.shape[0]
        each = torch.arange(size, device="cpu").view(-1, sum(parts))
        features = list(each[:, start : start + parts[chosen]])
        return _matrix(f"{name}.{child}", projection, features, holds)

    value = module.kv_b_proj.weight.shape[0] // heads - nope
    matrices = {
        "uq": rows(up, (nope, rope), 0, "query"), "qr": rows(up, (nope, rope), 1, "query"),
        "dkv": rows("kv_a_proj_with_mqa", (rank, rope), 0, "latent"),
        "kr": rows("kv_a_proj_with_mqa", (rank, rope), 1, "key"),
        "uk": rows("kv_b_proj", (nope, value), 0, "key"),
    }  # fmt: skip
    if up == "q_b_proj":
        matrices["dq"] = rows("q_a_proj", (module.q_a_proj.weight.shape[0],), 0, "query")
    return matrices
