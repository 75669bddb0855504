"""Contenders of the benchmark: our verbs and their rivals, as calls of no arguments.

Ours is compared with the float64 reference first, on a slice of the shape.
"""

import math

import torch

from hf_sigmoid import functional, reference

# Yardsticks of decoding: a copy of as many bytes as it reads, and what transformers' paged cache
# does before it calls us, to read the keys and values of a sequence from their blocks.
DECODING = ("copy", "gather")
CACHE_BLOCK = 32
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OURS = ("sigmoid", "ssmax", "softmax")  # softmax: our ssmax kernels with a multiplier of 1
# Lengths in [batch, length, heads, dim], what these packages take.
LENGTH_FIRST = ("triton-sigmoid", "flash-attn-2", "flash-attn-3")
PACKAGES = {
    "sdpa": "torch", "sdpa-cudnn": "torch", "flex": "torch", "copy": "torch", "gather": "torch",
    "triton-sigmoid": "triton-sigmoid", "flash-attn-2": "flash-attn",
    "flash-attn-3": "flash-attn-3",
}  # fmt: skip


def verify(name: str, shape: dict, device: torch.device) -> None:
    """Raise unless our output and gradients on a slice of a shape are as exact as its dtype allows.

    One key head and its queries, up to 1024 of each: enough for several tiles and a diagonal.
    """
    heads = shape["H"] // shape["G"]
    small = {**shape, "B": 1, "H": heads, "G": 1, "M": min(shape["M"], 1024)}
    small["N"] = small["M"] if shape["M"] == shape["N"] else min(shape["N"], 1024)
    dtype = DTYPES[shape["dtype"]]
    inputs = tensors(small, device, dtype)
    exact = outcome(inputs, torch.float64, expected(name, small))
    plain = outcome(inputs, dtype, expected(name, small, upcast=False))
    given = outcome(inputs, dtype, ours(name, small, device))
    for result, right in exact.items():
        error, own = ((x[result].double() - right).abs().max().item() for x in (given, plain))
        budget = 2 * own + 4 * torch.finfo(dtype).eps * right.abs().max().item()
        if not error <= budget:
            why = f"error {error:.2g}, budget {budget:.2g}"
            raise ArithmeticError(f"wrong {result}, not timed: {why}")


def outcome(inputs, dtype, call) -> dict[str, torch.Tensor]:
    """Output of a call on the same inputs in some dtype, and the gradients of q, k and v."""
    *leaves, do = (tensor.to(dtype) for tensor in inputs)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    output = call(*leaves)
    dq, dk, dv = torch.autograd.grad(output, leaves, do)
    return {"output": output.detach(), "dq": dq, "dk": dk, "dv": dv}


def tensors(shape: dict, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, do."""
    B, H, G, M, N, D = (shape[letter] for letter in "BHGMND")
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((B, H, M, D), (B, G, N, D), (B, G, N, D), (B, H, M, D))
    return [torch.randn(s, generator=generator, device=device, dtype=dtype) for s in sizes]


def numbers(name: str, shape: dict) -> dict:
    """The per-query terms of a call after training, of the size that the papers give."""
    if name == "sigmoid":
        return {"bias": -math.log(shape["N"])}
    return {"multiplier": 1.0 if name == "softmax" else 0.2 * math.log(shape["N"])}


def ours(name: str, shape: dict, device: torch.device):
    verb = functional.sigmoid_attention if name == "sigmoid" else functional.ssmax_attention
    backend = "triton" if device.type == "cuda" else "auto"
    given = numbers(name, shape)
    return lambda q, k, v: verb(q, k, v, **given, is_causal=shape["is_causal"], backend=backend)


def expected(name: str, shape: dict, **options):
    verb = reference.sigmoid_attention if name == "sigmoid" else reference.ssmax_attention
    given = {**numbers(name, shape), "is_causal": shape["is_causal"], **options}
    return lambda q, k, v: verb(q, k, v, **given)[0]


def rival(name: str, shape: dict, device: torch.device):
    """Another implementation as a call (q, k, v) in its own layout; ImportError if missing."""
    is_causal, grouped = shape["is_causal"], shape["H"] != shape["G"]
    if name in ("sdpa", "sdpa-cudnn"):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def softmax(q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, enable_gqa=grouped
            )

        def cudnn(q, k, v):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return softmax(q, k, v)

        return softmax if name == "sdpa" else cudnn
    if name == "flex":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        flex, mask = torch.compile(flex_attention, dynamic=False), None
        if is_causal:
            mask = create_block_mask(
                lambda b, h, m, n: m >= n, None, None, shape["M"], shape["N"], device=device
            )
        return lambda q, k, v: flex(q, k, v, block_mask=mask, enable_gqa=grouped)
    if name == "triton-sigmoid":
        from triton_sigmoid import sigmoid_attention

        if grouped or shape["M"] != shape["N"]:
            raise NotImplementedError("triton-sigmoid has no grouped heads and no decoding")
        scale, bias = shape["D"] ** -0.5, -math.log(shape["N"])
        return lambda q, k, v: sigmoid_attention(q, k, v, is_causal, scale, sigmoid_bias=bias)
    if name == "flash-attn-2":
        from flash_attn import flash_attn_func
    else:
        from flash_attn_interface import flash_attn_func

    def flash(q, k, v):
        output = flash_attn_func(q, k, v, causal=is_causal)
        return output[0] if isinstance(output, tuple) else output

    return flash


def prepare(name: str, shape: dict, device: torch.device):
    """The call that is timed: a function of no arguments."""
    q, k, v, do = tensors(shape, device, DTYPES[shape["dtype"]])
    if name == "copy":
        # A copy reads and writes: k's bytes twice are those of k and v once.
        target = torch.empty_like(k)
        return lambda: target.copy_(k)
    if name == "gather":
        cache = [x.transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v)]
        blocks = torch.randperm(math.ceil(len(cache[0]) / CACHE_BLOCK), device=device)
        index = (blocks[:, None] * CACHE_BLOCK + torch.arange(CACHE_BLOCK, device=device)).flatten()
        index = index[index < len(cache[0])]
        return lambda: [x.index_select(0, index) for x in cache]
    call = ours(name, shape, device) if name in OURS else rival(name, shape, device)
    if name in LENGTH_FIRST:
        q, k, v, do = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v, do))
    if shape["pass"] == "forward":

        def forward():
            with torch.no_grad():
                call(q, k, v)

        return forward
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    if shape["pass"] == "both":
        return lambda: torch.autograd.grad(call(*leaves), leaves, do)
    output = call(*leaves)
    return lambda: torch.autograd.grad(output, leaves, do, retain_graph=True)
