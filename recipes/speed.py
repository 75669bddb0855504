"""How fast a step was, and how much of the hardware it used."""

import resource
import sys
from typing import Any

import torch

# Dense bfloat16 with float32 sums, in FLOP/s, from the vendors' data sheets; the longest name wins.
PEAK = {
    "A100": 312e12, "A800": 312e12, "A10": 125e12, "L4": 121e12, "L40S": 362e12, "H100": 989e12,
    "H100 PCIe": 756e12, "H200": 989e12, "H800": 989e12, "GH200": 989e12, "B200": 2250e12,
    "RTX 3090": 71e12, "RTX 4090": 165e12, "MI250X": 383e12, "MI300X": 1307e12,
}  # fmt: skip


class Speed:
    """Floating-point operations of a training step of one model.

        6 N T + 12 L H D Σ_t n_t      N weights that multiply, T tokens, n_t keys that token t sees

    The attention term counts what a causal, packed block computes, not its square. Weights that do
    not train need no gradient of their own: 4 N for them (Chowdhery et al. 2022, arXiv 2204.02311,
    appendix B). Recomputing activations is work, not use, and is not counted.
    """

    def __init__(self, model: Any, device: torch.device, precision: str):
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.attention = 12 * config.num_hidden_layers * heads * head_dim
        self.weights = 0
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        looked_up = None if embedding is None else embedding.weight
        tied = head is not None and looked_up is not None and head.weight is looked_up
        for parameter in model.parameters():
            if parameter.ndim > 1 and (parameter is not looked_up or tied):
                self.weights += (6 if parameter.requires_grad else 4) * parameter.numel()
        self.device = device
        self.peak = _peak(device) if precision == "bf16" else None

    def measure(self, *, tokens: int, keys: int, seconds: float, processes: int) -> dict[str, Any]:
        """Rates of a step over all processes; `mfu` (None: the peak is not known) is a part of 1.

        Args:
            keys: Σ n of the step's tokens.
        """
        flops = (self.weights * tokens + self.attention * keys) / seconds
        values = {
            "tok_s": tokens / seconds,
            "tok_s_process": tokens / seconds / processes,
            "tflop_s": flops / 1e12,
            "mfu": flops / (self.peak * processes) if self.peak else None,
            "memory_gb": self.memory() / 1e9,
        }
        return {key: value and float(f"{value:.5g}") for key, value in values.items()}

    def memory(self) -> int:
        """The most that this process has held so far, in bytes: of the device, or resident."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [each for each in PEAK if each in name]
    return PEAK[max(known, key=len)] if known else None
