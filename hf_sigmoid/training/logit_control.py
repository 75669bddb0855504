"""Logit control in a training run: the rates of W_Q and W_K, QK-clip, and a look at attention.

What each does is in the package `hf_sigmoid.logit_control`; here they get their moments in a step
and their place in a checkpoint.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hf_sigmoid import text
from hf_sigmoid.conversions.compare import token_windows
from hf_sigmoid.errors import BadInput
from hf_sigmoid.logit_control import monitor
from hf_sigmoid.logit_control.blocks import plain_name
from hf_sigmoid.optim import Heads, QKClip, QuacK, find_heads
from hf_sigmoid.parameters import FUNCTIONS, attention_modules
from hf_sigmoid.training.run_keys import Optim, Run

FILE = "logit_control.safetensors"  # in a checkpoint
PROBE = 128  # tokens of the batch whose logits are followed


def find_controlled(optim: Optim, twin: Any) -> Heads | None:
    """The heads whose logits can be controlled, None if there are none and none is asked for.

    Args:
        twin: the model without weights, so that these may be divided later.

    Raises:
        BadInput: control is asked for of a model whose query and key projections cannot be told.
    """
    asked = [k for k in ("qk_tau", "qk_clip") if getattr(optim, k) is not None]
    asked += ["qk_lr_scale"] if optim.qk_lr_scale != 1 else []
    heads = None
    try:
        with warnings.catch_warnings():
            if not asked:
                warnings.simplefilter("ignore")
            heads = find_heads(twin, torch.arange(8)[None])
    except Exception as error:  # a model may do anything with tensors that have no values
        if asked:
            raise BadInput(f"optim.{asked[0]}: {error}") from error
    if optim.qk_clip is not None:
        _check_clip(heads, twin)
    if optim.qk_lr_scale != 1 and heads.fused:
        raise BadInput(
            f"optim.qk_lr_scale: expected 1 for a model whose {heads.fused[0]} holds more than "
            "queries or keys (optim.qk_tau with qk_rule=constant scales their rows alone)"
        )
    return heads


def _check_clip(heads: Heads, twin: Any) -> None:
    if (attention := twin.config._attn_implementation) not in FUNCTIONS:
        raise BadInput(
            f"optim.qk_clip: expected attn {' or '.join(FUNCTIONS)}, got {attention}, whose "
            "logits nobody sees"
        )
    if heads.normed:
        raise BadInput(
            f"optim.qk_clip: expected a model whose logits follow W_Q and W_K, got "
            f"{heads.normed[0]}, which norms its queries or keys"
        )
    called = {plain_name(name) for name, _ in attention_modules(twin)}
    if unknown := sorted(called - heads.blocks.keys()):
        raise BadInput(
            f"optim.qk_clip: the query and key projections of {unknown[0]} were not found"
        )


def query_key_names(heads: Heads | None, model: Any) -> set[str]:
    """Parameters of the group `qk`: projections that are nothing else, or their adapters."""
    if heads is None:
        return set()
    found = heads.projections
    owners = {name.rpartition(".")[0] for kind in ("query", "key") for name in found[kind]}
    names = set()
    for name, _ in model.named_parameters():
        parts = plain_name(name).split(".")
        within = any(".".join(parts[:i]) in owners for i in range(1, len(parts)))
        if within and parts[-1] != "bias":  # biases stay with the vectors that do not decay
            names.add(name)
    return names


class LogitControl:
    """The control of a model that trains, as it is inside DDP."""

    def __init__(self, run: Run, heads: Heads | None, model: Any, optimizer: Any, tokenizer: Any):
        optim, self.model = run.optim, model
        self.quack: QuacK | None = None
        self.clip: QKClip | None = None
        self.look: monitor.Health | None = None
        self.recorder = None
        bound = heads and heads.bind(model)
        try:
            if optim.qk_tau is not None:
                self.quack = QuacK(optimizer, bound, tau=optim.qk_tau, rule=optim.qk_rule)
            if optim.qk_clip is not None:
                self.clip = QKClip(bound, threshold=optim.qk_clip)
        except ValueError as error:
            raise BadInput(f"optim.qk_tau or qk_clip: {error}") from error
        if run.evaluate.health_every:
            length = min(PROBE, run.train.block_size)
            ids = token_windows(tokenizer, text.held_out(), length, 1)
            self.look = monitor.Health(model, ids.to(next(model.parameters()).device))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While it lasts, the largest logits are noted, if QK-clip needs them."""
        if self.clip is None:
            yield
            return
        with monitor.record(self.model) as self.recorder:
            yield

    def after_step(self, lr: float) -> dict[str, Any]:
        """Clip; what to log of the control."""
        values: dict[str, Any] = {}
        if self.quack is not None:
            values["qk_lr"] = [lr * share for share in self.quack.range]
        if self.clip is not None:
            maxima = monitor.all_reduce_max(self.recorder.max_logits())
            values["clipped_heads"] = self.clip.clip(maxima)
            values["max_logit"] = max(float(each.max()) for each in maxima.values())
        return values

    def health(self) -> dict[str, Any]:
        return monitor.summary(self.look.measure())

    def state(self) -> dict[str, torch.Tensor]:
        """For a checkpoint; every process must ask."""
        return {
            prefix + key: tensor
            for prefix, part in self._parts()
            for key, tensor in part.state_dict().items()
        }

    def write(self, folder: Path, state: dict[str, torch.Tensor]) -> None:
        if state:
            save_file({key: t.contiguous() for key, t in state.items()}, folder / FILE)

    def load(self, folder: Path) -> None:
        if not (folder / FILE).is_file():
            return
        state = load_file(folder / FILE)
        for prefix, part in self._parts():
            own = {k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)}
            part.load_state_dict(own)

    def _parts(self) -> list[tuple[str, Any]]:
        """The parts that have a state, by the beginning of their names in a checkpoint."""
        parts = (("quack.", self.quack), ("health.", self.look))
        return [(prefix, part) for prefix, part in parts if part is not None]
