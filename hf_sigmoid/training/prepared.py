"""A run up to its first step: what can be refused before weights are loaded, then the model."""

import math
from typing import Any

import torch
from accelerate.utils import set_seed
from tqdm import tqdm
from transformers import AutoConfig

import hf_sigmoid
from hf_sigmoid.configuration import find_section
from hf_sigmoid.context_parallel import check_model
from hf_sigmoid.embedded import checkpoint as resolve
from hf_sigmoid.errors import BadInput
from hf_sigmoid.loading import (
    check_weights,
    fingerprint,
    load,
    load_model,
    max_positions,
    twin,
)
from hf_sigmoid.shards import reshard
from hf_sigmoid.training import optimization, parallel, trackers, trained
from hf_sigmoid.training.held_out import HeldOut
from hf_sigmoid.training.logit_control import LogitControl
from hf_sigmoid.training.loop import Loop
from hf_sigmoid.training.packing import documents_leak
from hf_sigmoid.training.speed import Speed


class Prepared(Loop):
    """`check`, then `build`."""

    splits_weights = True

    def check(self, *, fresh: bool = False) -> None:
        """Everything that can be known, and refused, before the weights are loaded.

        Args:
            fresh: do not go on from a checkpoint.
        """
        run = self.run
        trackers.check(run.log.trackers)
        trained.check(run)
        self._begin(log_with=run.log.trackers, project_dir=str(self.folder))
        with self.accelerator.local_main_process_first():
            self.source = resolve(run.model)
        check_weights(self.source)
        self._refuse_another_function()
        self.twin = twin(self.source, run.attn)
        self.context_group = self.layout.context_group()
        self._refuse_what_cannot_be_divided()
        self._tokenize(self.source)
        self._count_steps()
        self.held_out = HeldOut(
            run.evaluate, self.tokenizer, run.train.block_size, max_positions(self.source)
        )
        self._find_checkpoint(fresh=fresh)
        self.control = LogitControl(run.optim, self.twin)

    def build(self) -> None:
        """The model and its optimiser, ready for a first step."""
        self.model = self._load_model()
        bare = self._bare_model()
        self.speed = Speed(bare, self.accelerator.device, self.run.train.precision)
        groups = optimization.parameter_groups(bare, self.run, self.query_key_names(bare))
        self.optimizer = optimization.make_optimizer(groups, self.run)
        self.control.begin(self.optimizer, self.tokenizer, self.run)
        self.skipped, self.skipped_in_a_row = 0, 0

    def _refuse_another_function(self) -> None:
        """A converted checkpoint trained on as something else would be saved as what it was."""
        section = find_section(load(AutoConfig, self.source))
        own, attn = section and section["function"], self.run.attn
        if section and attn not in (None, own):
            raise BadInput(
                f"attn: {self.run.model} was converted to {own}, got {attn}; leave attn out, or "
                "make it a softmax model again by hf-sigmoid revert first"
            )

    def _refuse_what_cannot_be_divided(self) -> None:
        run, layout = self.run, self.layout
        divided = layout.splits_weights or layout.context > 1
        if divided and run.parameters == "lora":
            raise BadInput(
                f"lora.rank: expected one process or data parallel with adapters, got {layout}"
            )
        if layout.splits_weights and run.optim.optimizer == "muon":
            raise BadInput(
                f"optim.optimizer: expected adamw with {layout}, got muon, which orthogonalises "
                "whole matrices"
            )
        if layout.context > 1:
            if run.train.block_size % layout.context:
                raise BadInput(
                    f"train.block_size: expected a multiple of the {layout.context} processes that "
                    f"share a row, got {run.train.block_size}"
                )
            try:
                check_model(self.twin)
            except hf_sigmoid.Unsupported as error:
                raise BadInput(f"parallelism_config_cp_size {layout.context}: {error}") from error
        if self.run.checkpoint.state == "sharded" and not self.layout.splits_weights:
            raise BadInput(
                "checkpoint.state: expected full where no weights are divided, got sharded on "
                f"{self.layout}"
            )

    def _count_steps(self) -> None:
        """The steps of `train.epochs`."""
        run, self.counted = self.run, None
        if run.train.epochs is None:
            return
        (documents,) = self.corpus.sources

        def count() -> int:
            bar = tqdm(documents, desc="counting tokens", unit="document")
            return sum(len(self.encode(document)) for document in bar if document.strip())

        tokens = self.counted = self._on_main(count)
        blocks = self.ranks * run.train.batch_size * run.train.grad_accumulation
        run.counted = max(1, math.ceil(run.train.epochs * tokens / (blocks * run.train.block_size)))
        if run.warmup_steps > run.steps:
            raise BadInput(
                f"optim.warmup_steps: expected at most the {run.steps} steps of "
                f"train.epochs={run.train.epochs}, got {run.warmup_steps}"
            )

    def _sources(self) -> dict[str, str]:
        found = super()._sources()
        parts = self.run.checkpoint.state == "sharded" or self._in_parts()
        if parts or self.run.parameters == "lora":
            found["weights"] = fingerprint(self.source, quick=True)
        return found

    def query_key_names(self, model: Any) -> set[str]:
        return self.control.query_key_names(model)

    def _check_disk(self, model: Any) -> None:
        """Room for the final model and for checkpoints, before the work."""
        run = self.run
        size = {True: 0, False: 0}
        for parameter in model.parameters():
            size[parameter.requires_grad] += 4 * parameter.numel()
        saved = size[True] if run.parameters == "lora" else sum(size.values())
        number = run.checkpoint.keep + 1 if run.checkpoint.every else 1  # one while it is written
        needed = sum(size.values()) + number * (saved + 2 * size[True])
        self._check_room(needed)

    def _load_model(self) -> Any:
        run = self.run
        saved = self.resumed.folder / "model" if self.resumed else None
        whole = saved is not None and run.parameters != "lora" and not self._in_parts()
        config = self.layout.distributed_config()
        # Weights stay in fp32: precision=bf16 is autocast, and small updates are not rounded away.
        with parallel.transformers_shards():
            model = load_model(
                str(saved) if whole else self.source,
                dtype=torch.float32,
                attn=run.attn,
                **({"distributed_config": config} if config else {}),
            )
        if self.layout.fsdp:
            parallel.tie_again(model)
        if config is None:
            # Where it will run: another device is another attention path.
            model.to(self.accelerator.device)
        self._check_documents(model)
        if run.train.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        set_seed(run.seed)  # the start of adapters
        model = trained.select(model, run, adapter=saved).train()
        self.control.bind(model)
        if self.layout.world > 1 and not self.layout.splits_weights:
            model = self.accelerator.prepare(model)
        return model

    def _in_parts(self) -> bool:
        return bool(self.resumed) and self.resumed.manifest["state"] == "sharded"

    def _check_documents(self, model: Any) -> None:
        leak = documents_leak(model)
        reshard(model)
        if leak:
            raise BadInput(
                f"{type(model).__name__} with attn {model.config._attn_implementation!r} lets the "
                "documents of a packed block see each other; expected one that honours position_ids"
            )

    def _bare_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model)
