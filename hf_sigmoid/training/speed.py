"""The speed of a step, and the part of the hardware that it used."""

import sys
from typing import Any

import psutil
import torch

# Dense bfloat16 with float32 sums, in FLOP/s, from the vendors' data sheets; the longest name wins.
PEAK = {
    "A100": 312e12, "A800": 312e12, "A10": 125e12, "L4": 121e12, "L40S": 362e12, "H100": 989e12,
    "H100 PCIe": 756e12, "H200": 989e12, "H800": 989e12, "GH200": 989e12, "B200": 2250e12,
    "RTX 3090": 71e12, "RTX 4090": 165e12, "MI250X": 383e12, "MI300X": 1307e12,
}  # fmt: skip


class Speed:
    """Floating-point operations of a training step of one model.

        6 N T + 12 H D Σ_l Σ_t n_lt

    N weights that multiply, T tokens, n_lt keys that token t sees in layer l. Of experts a token
    meets some of all. The attention term counts what a causal, packed block computes, not its
    square. Weights that do not train need no gradient of their own: 4 N for them (Chowdhery et al.
    2022, arXiv 2204.02311, appendix B). Recomputing activations is work, not use, and is not
    counted.
    """

    def __init__(self, model: Any, device: torch.device, precision: str):
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.attention = 12 * heads * head_dim
        kinds = getattr(config, "layer_types", None) or []
        self.window = getattr(config, "sliding_window", None)
        self.sliding = sum(kind == "sliding_attention" for kind in kinds) if self.window else 0
        self.full = config.num_hidden_layers - self.sliding
        self.weights = 0
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        looked_up = None if embedding is None else embedding.weight
        tied = head is not None and looked_up is not None and head.weight is looked_up
        met = _share_of_experts(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and (parameter is not looked_up or tied):
                share = met if "experts" in name.split(".") else 1
                self.weights += (6 if parameter.requires_grad else 4) * parameter.numel() * share
        self.device = device
        self.peak = _peak(device) if precision == "bf16" else None

    def keys(self, position_ids: torch.Tensor) -> int:
        """Σ over layers and tokens of the keys that a token sees, of packed rows `[B, T]`."""
        seen = position_ids + 1
        total = self.full * int(seen.sum())
        if self.sliding:
            total += self.sliding * int(seen.clamp(max=self.window).sum())
        return total

    def measure(self, *, tokens: int, keys: int, seconds: float, processes: int) -> dict[str, Any]:
        """Rates of a step over all processes; `mfu` (None: the peak is not known) is a part of 1.

        Args:
            keys: of the step's rows, by `keys`.
        """
        flops = (self.weights * tokens + self.attention * keys) / seconds
        values = {
            "tok_s": tokens / seconds, "tok_s_process": tokens / seconds / processes,
            "tflop_s": flops / 1e12, "mfu": flops / (self.peak * processes) if self.peak else None,
            "memory_gb": self.memory() / 1e9,
        }  # fmt: skip
        return {key: value and float(f"{value:.5g}") for key, value in values.items()}

    def memory(self) -> int:
        """The most that this process has held so far, in bytes: of the device, or resident."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            import resource
        except ImportError:  # Windows
            held = psutil.Process().memory_info()
            return getattr(held, "peak_wset", held.rss)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _share_of_experts(config: Any) -> float:
    """The part of all experts that a token meets."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((n for n in (getattr(config, name, None) for name in names) if n), None)
    top = getattr(config, "num_experts_per_tok", None)
    return top / experts if experts and top else 1.0


def _peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [each for each in PEAK if each in name]
    return PEAK[max(known, key=len)] if known else None
