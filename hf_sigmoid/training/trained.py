"""The parameters that train: all, those of attention, the per-query terms alone, or adapters."""

from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from hf_sigmoid import parameters
from hf_sigmoid.errors import BadInput
from hf_sigmoid.parameters import HOLDER
from hf_sigmoid.training.run_keys import Lora, Run


def select(model: Any, run: Run, adapter: Path | None = None) -> Any:
    """The model, or the PEFT model around it, with `requires_grad` of what is to train.

    Args:
        adapter: a folder to take trained adapters from; None begins with new ones.

    Raises:
        BadInput: nothing of that kind in the model.
    """
    if run.parameters == "lora":
        model = _with_adapters(model, run.lora, adapter)
    elif run.parameters != "all":
        names = _attention_names(model)
        if run.parameters == "log_length":
            names = {name for name in names if HOLDER in name.split(".")}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
    if not any(p.requires_grad for p in model.parameters()):
        raise BadInput(
            f"train.parameters: expected some that {run.model} has, got {run.parameters}: nothing "
            "would train"
        )
    return model


def _attention_names(model: Any) -> set[str]:
    return {
        f"{module_name}.{name}"
        for module_name, module in parameters.attention_modules(model)
        for name, _ in module.named_parameters()
    }


def _with_adapters(model: Any, lora: Lora, adapter: Path | None) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    if adapter is not None:
        return PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    projections = [
        f"{name}.{child}"
        for name, module in parameters.attention_modules(model)
        for child, part in module.named_modules()
        if isinstance(part, torch.nn.Linear | Conv1D)
    ]
    holders = any(HOLDER in name.split(".") for name, _ in model.named_modules())
    try:
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=projections if lora.targets == "attention" else "all-linear",
            # Few, and a low-rank change of them is no less than all of them.
            modules_to_save=[HOLDER] if holders else None,
            task_type="CAUSAL_LM",
        )
        return get_peft_model(model, config)
    except ValueError as error:
        raise BadInput(f"lora.targets {lora.targets}: {error}") from error
