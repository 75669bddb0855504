"""The calls that the static report compiles, as the verbs make them, and the GPUs for which."""

import os

import torch
from triton.backends.compiler import GPUTarget

from hf_sigmoid.kernels.flash import attention

TARGETS = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100, 120)},
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# A case is one call of the operator: function, dtype, D or D/V, and what is special about it.
PLAIN = [f"{dtype} {D}{extra}" for extra in ("", " decode") for D in (64, 128) for dtype in DTYPES]
PLAIN = [case for case in PLAIN if "fp32" not in case] + ["bf16 64 tanh"]
# What must compile and fit into shared memory, whatever it spills.
OTHER = ["bf16 96/40 terms", "fp16 64 terms", "fp32 64 terms", "fp32 128 terms"]
OTHER += ["bf16 256", "fp32 256", "bf16 128 statistics", "bf16 64 mask dropout"]
# On sm_90, whose copy engine does not read an expanded key.
EXPANDED = "sigmoid bf16 128 expanded"
# Where the table has rows for calls with terms: what takes the most shared memory.
BIASED = [
    (target, f"{function} bf16 128 logit_bias")
    for target in ("sm_90", "sm_100", "sm_120")
    for function in ("sigmoid", "ssmax")
]
CASES = [f"{function} {case}" for case in PLAIN + OTHER for function in ("sigmoid", "ssmax")]
QUICK = [  # what the test suite has the time for; the slowest first
    ("gfx942", "sigmoid bf16 64"),
    ("sm_90", "sigmoid bf16 64"),
    ("sm_90", "ssmax bf16 96/40 terms"),
    ("sm_80", "ssmax fp16 128"),
    ("sm_80", "sigmoid bf16 64 decode"),
]


def is_plain(case: str) -> bool:
    return case.split(" ", 1)[1] in PLAIN or case == EXPANDED


def call(case: str) -> None:
    """Both passes of one call; inside `compiling` the results are garbage."""
    function, dtype, dims, *special = case.split()
    D, V = (int(dims.split("/")[i]) for i in (0, -1))
    B, H, G = 2, 8, 2
    M, N = (1, 4096) if "decode" in special else (512, 512)
    q = torch.zeros(B, H, M, D, dtype=DTYPES[dtype])
    k, v = (q.new_zeros(B, G, N, dim) for dim in (D, V))
    if "expanded" in special:
        k, v = (tensor[:, :1].expand(tensor.shape) for tensor in (k, v))
    q.requires_grad_()
    # As the verbs pass them: numbers of a head expanded over rows, masks over heads.
    row = torch.zeros(H, 1).expand(B, H, M)
    intervals = torch.zeros(B, M, 2, dtype=torch.int32)
    os.environ["HF_SIGMOID_FORM"] = "tanh" if "tanh" in special else "accurate"
    if "terms" in special:
        special += ["mask", "logit_bias", "alibi", "sinks", "softcap"]
    mask = logit_bias = alibi_slopes = sinks = None
    if "mask" in special:
        mask = torch.zeros(B, 1, M, N, dtype=torch.bool).expand(B, H, M, N)
    if "logit_bias" in special:
        logit_bias = torch.zeros(1, H, M, N, requires_grad=True)
    if "alibi" in special:
        alibi_slopes = torch.zeros(H).expand(B, H)
    if "sinks" in special and function == "ssmax":
        sinks = torch.zeros(H)
    softcap = 30.0 if "softcap" in special else 0.0
    terms = (mask, logit_bias, alibi_slopes, sinks)
    dropout = 0.1 if "dropout" in special else 0.0
    arguments = (q, k, v, row, intervals, *terms, function, D**-0.5, softcap, dropout, 0)
    output, *_ = attention(*arguments, "statistics" in special)
    if "decode" not in special:
        output.backward(torch.zeros_like(output))
