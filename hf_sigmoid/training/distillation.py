"""A sigmoid (or ssmax) student beside the softmax model that it came from, and its losses.

    layer-wise    ‖ student_l(x) − softmax_l(x) ‖² / ‖ softmax_l(x) ‖²   of every attention module's
                  output, x what the module gets in the softmax model; mean over rows
    end to end    kl · KL(softmax model ‖ student) + (1 − kl) · cross entropy, a token

Both models share every weight that does not train. While it trains, each converted module also has
a gain and a temperature per head (`conversions/folding.py`), which are folded into its projections
at the end.
"""

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from hf_sigmoid import attention as transformers_attention
from hf_sigmoid import masks, parameters
from hf_sigmoid.conversions import folding, revert
from hf_sigmoid.errors import BadInput
from hf_sigmoid.logit_control.heads import is_projection
from hf_sigmoid.replace_attention import give_back, use
from hf_sigmoid.training.packing import model_inputs

FUNCTION = "hf_sigmoid_distillation"  # the attention function of both models meanwhile
SCALES = "head_scales"


class HeadScales(nn.Module):
    """Gain and temperature `[H]` of one attention module, and the share of sigmoid in its output.

    Where the module has no projection that a number could be folded into, it is None.
    """

    def __init__(self, heads: int, places: folding.Places, device: torch.device):
        super().__init__()
        for kind in folding.KINDS:
            ones = None
            if getattr(places, kind) is not None:
                ones = nn.Parameter(torch.ones(heads, device=device))
            self.register_parameter(kind, ones)
        self.blend = 1.0  # 0: softmax, 1: the student's own function


def attention(module: nn.Module, query: Tensor, key, value, attention_mask, **kwargs):
    """Softmax in modules without scales, else gain · function(τ_h q, …): of both models."""

    def of_function(name: str, query: Tensor):
        return transformers_attention.attention(
            name, module, query, key, value, attention_mask, **kwargs
        )

    scales = module._modules.get(SCALES)
    if scales is None:
        return of_function("softmax", query)
    scaled = query
    if scales.temperature is not None:
        scaled = query * scales.temperature.to(query.dtype).view(1, -1, 1, 1)
    output, _ = of_function(parameters.holder_of(module).function, scaled)
    if scales.gain is not None:
        output = output * scales.gain.to(output.dtype).view(1, 1, -1, 1)
    if scales.blend < 1:
        output = torch.lerp(of_function("softmax", query)[0], output, scales.blend)
    return output, None


class Distillation:
    """A teacher and its student.

    Both compute in float32; `finish` gives the student's tensors their dtypes back.

    Args:
        student: a converted model; it is changed in place.
        teacher: a softmax model, as `softmax_inside` makes one of the student.
        lora_rank: of low-rank changes to the projections; None: there are none.
        probe: some token ids `[1, T]`.
    """

    def __init__(
        self, student: PreTrainedModel, teacher: PreTrainedModel, *, lora_rank: int | None,
        probe: Tensor,
    ):  # fmt: skip
        self.dtypes = {name: tensor.dtype for name, tensor in student.state_dict().items()}
        self.student, self.teacher = student.float(), teacher.float()
        self.places = folding.find_places(student, probe)
        self.modules = {
            name: module
            for name, module in parameters.attention_modules(student)
            if (holder := parameters.holder_of(module)) and holder.function != "softmax"
        }
        for name, module in self.modules.items():
            device = next(module.parameters()).device
            scales = HeadScales(parameters.head_count(module), self.places[name], device)
            module.add_module(SCALES, scales)
        self.lora = lora_rank is not None
        if self.lora:
            self._add_lora(lora_rank)
        AttentionInterface.register(FUNCTION, attention)
        AttentionMaskInterface.register(FUNCTION, masks.interval_mask)
        self._before = _use(self.student, FUNCTION) + _use(self.teacher, FUNCTION)
        self.teacher.requires_grad_(False).eval()

    def select(self, trains: str) -> dict[str, nn.Parameter]:
        """Let these parameters of the student train and no others; by name."""
        self.student.requires_grad_(False)
        chosen = {}
        inside = tuple(f"{name}." for name in self.modules)
        for name, parameter in self.student.named_parameters():
            number = f".{parameters.HOLDER}." in name or f".{SCALES}." in name
            low_rank = ".lora_" in name
            wanted = {
                "numbers": number, "lora": number or low_rank, "all": not low_rank,
                "projections": name.startswith(inside) and not low_rank,
            }[trains]  # fmt: skip
            if wanted and parameter.is_floating_point():
                chosen[name] = parameter.requires_grad_()
        return chosen

    def layerwise(self, batch: dict[str, Tensor], *, scale: float) -> dict[str, float]:
        """One forward of the teacher; gradients of each module's own error, which is returned.

        Args:
            scale: of the gradients.
        """
        errors: dict[str, float] = {}

        def distil(name: str):
            def hook(module, args, kwargs, output):
                # Some models hand a dict from layer to layer (shared keys and values): the
                # student must not write into the teacher's.
                own = {k: dict(v) if isinstance(v, dict) else v for k, v in kwargs.items()}
                with torch.enable_grad():
                    found = self.modules[name](*args, **own)
                    error = _relative(found, output, batch["weights"])
                    if error.requires_grad:
                        (error * scale).backward()
                errors[name] = error.item()

            return hook

        with ExitStack() as hooks, torch.no_grad():
            for name in self.modules:
                module = self.teacher.get_submodule(name)
                hook = module.register_forward_hook(distil(name), with_kwargs=True)
                hooks.callback(hook.remove)
            # Not the head: its logits are of no use here.
            self.teacher.base_model(**model_inputs(batch))
        return errors

    def end_to_end(self, batch: dict[str, Tensor], *, kl: float, ignored: int) -> Tensor:
        """The loss, summed over the tokens that have a label, each times its weight."""
        labels = batch["labels"].flatten()
        asked = labels != ignored
        weights = batch["weights"].flatten()[asked]
        logits = self.student(**model_inputs(batch)).logits.flatten(0, 1)[asked].float()
        loss = logits.new_zeros(())
        if kl < 1:
            entropy = F.cross_entropy(logits, labels[asked], reduction="none")
            loss = (1 - kl) * (entropy * weights).sum()
        if kl > 0:
            with torch.no_grad():
                target = self.teacher(**model_inputs(batch)).logits.flatten(0, 1)[asked].float()
            divergence = F.kl_div(
                logits.log_softmax(-1), target.log_softmax(-1), reduction="none", log_target=True
            ).sum(-1)
            loss = loss + kl * (divergence * weights).sum()
        return loss

    def blend(self, share: float) -> None:
        """The share of the student's own function in its attention outputs."""
        for module in self.modules.values():
            module._modules[SCALES].blend = share

    def finish(self, probe: Tensor, *, keep_originals: bool) -> folding.Folded:
        """Fold gains and temperatures, and leave a plain converted model in `self.student`.

        Raises:
            RuntimeError: the folded model computes something else.
        """
        self.blend(1.0)
        self.student.eval()
        with torch.no_grad():
            expected = self.student(probe, use_cache=False).logits
        if self.lora:
            self._merge_lora()
        factors = {}
        for name, module in self.modules.items():
            scales = module._modules.pop(SCALES)
            factors |= {f"{kind}/{name}": p.detach() for kind, p in scales.named_parameters()}
        give_back(self._before)
        folded = folding.fold(self.student, self.places, factors, keep_originals=keep_originals)
        with torch.no_grad():
            found = self.student(probe, use_cache=False).logits
        difference = ((found - expected).abs().max() / expected.abs().max()).item()
        if not difference <= 1e-3:
            raise RuntimeError(
                "gains and temperatures folded into the projections must not change the model by "
                f"more than 1e-3, got {difference:.1e}"
            )
        for name, tensor in self.student.state_dict(keep_vars=True).items():
            tensor.data = tensor.data.to(self.dtypes[name])
        for name, original in folded.originals.items():
            folded.originals[name] = original.to(self.dtypes[name])
        if folded.factors:
            setattr(self.student.config, folding.RECORD, True)
        return folded

    def _add_lora(self, rank: int) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        names = [
            f"{name}.{child}"
            for name, module in self.modules.items()
            for child, part in module.named_modules()
            if is_projection(part)
        ]
        if not names:
            raise BadInput("lora: no converted module has a plain projection to change")
        inject_adapter_in_model(
            LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names), self.student
        )

    def _merge_lora(self) -> None:
        from peft.tuners.lora import LoraLayer

        for name, module in list(self.student.named_modules()):
            if isinstance(module, LoraLayer):
                module.merge()
                owner, _, last = name.rpartition(".")
                setattr(self.student.get_submodule(owner), last, module.get_base_layer())


def softmax_inside(
    student: PreTrainedModel, folded: folding.Folded | None, trains: set[str]
) -> PreTrainedModel:
    """The softmax model inside a converted one; what never trains is shared, not copied.

    Args:
        folded: what was folded into the student earlier, which its teacher is without.
        trains: "numbers", "projections", "lora" or "all": what any stage will train.
    """
    own: tuple[str, ...] = ("",) if "all" in trains else ()
    if "projections" in trains:
        own += tuple(f"{name}." for name, _ in parameters.attention_modules(student))
    shared = [p for name, p in student.named_parameters() if not name.startswith(own)]
    teacher = revert(copy.deepcopy(student, {id(p): p for p in shared}))
    if folded is not None:
        folding.restore(teacher, folded)
    return teacher


def _use(model: PreTrainedModel, function: str) -> list[tuple]:
    """Switch every config of a model to an attention function; what they had before."""
    configs = [model.config, *(getattr(module, "config", None) for module in model.modules())]
    return use({id(each): each for each in configs if each is not None}.values(), function)


def _relative(found: Any, target: Any, weights: Tensor) -> Tensor:
    """Mean over the rows of a batch, so that it does not depend on how rows are divided.

    Args:
        weights: of the tokens, `[B, T]`.
    """
    found, target = (each[0] if isinstance(each, tuple) else each for each in (found, target))
    found, target = found.float(), target.float()
    error, norm = (((each**2).sum(2) * weights).sum(1) for each in (found - target, target))
    return (error / norm.clamp(min=1e-20)).mean()


def load_trained(file: Path, named: dict[str, nn.Parameter]) -> None:
    """Put back what a checkpoint holds of the student's trained parameters."""
    tensors = load_file(file)
    if tensors.keys() != named.keys():
        raise BadInput(f"{file} holds other parameters than this run trains")
    with torch.no_grad():
        for name, tensor in tensors.items():
            named[name].copy_(tensor)
