"""What tests/test_launches.py runs on the stub driver, in processes of their own; prints JSON.

python tests/launches_worker.py launch ARCH    # every kernel, odd shapes
python tests/launches_worker.py refuse         # what the stub must refuse
python tests/launches_worker.py compile        # counted, and compiled
"""

import json
import multiprocessing
import sys
from pathlib import Path

import stub_cuda
import torch
import triton
from triton.runtime.driver import driver

from hf_sigmoid import functional

# Odd lengths, grouped heads, and between them every optional argument, on every chip; what is rare
# on one only, for the time that compiling takes.
# function, dtype, B, H, G, M, N, D, V, what is special
COMMON = [
    ("sigmoid", "bfloat16", 2, 6, 2, 301, 335, 128, 128, {"backward", "intervals"}),
    ("ssmax", "float16", 1, 4, 1, 77, 129, 96, 40, {"backward", "terms", "statistics"}),
    ("ssmax", "bfloat16", 3, 8, 2, 1, 1001, 64, 64, {"sinks", "statistics"}),
]
RARE = {
    80: [("sigmoid", "float32", 1, 2, 2, 5, 4099, 64, 64, {"dense", "logit_bias"})],
    90: [
        ("sigmoid", "bfloat16", 2, 6, 2, 301, 335, 128, 128, {"expanded"}),
        ("ssmax", "bfloat16", 1, 4, 4, 129, 257, 64, 64, {"heads last"}),
        ("sigmoid", "float16", 1, 1, 1, 1, 1, 128, 128, {"backward"}),
    ],
    100: [("sigmoid", "float16", 2, 4, 2, 7, 517, 128, 128, {"intervals"})],
    120: [
        ("ssmax", "bfloat16", 1, 16, 1, 33, 65, 256, 256, {"dense"}),
        # More programs than a grid's second and third dimensions take.
        ("sigmoid", "bfloat16", 70001, 2, 1, 1, 300, 64, 64, {"one batch"}),
    ],
}


def call(function, dtype, B, H, G, M, N, D, V, special) -> None:
    dtype = getattr(torch, dtype)
    sizes = ((B, H, M, D), (B, G, N, D), (B, G, N, V))
    if "one batch" in special:
        q, k, v = (torch.zeros(1, *size[1:], dtype=dtype).expand(size) for size in sizes)
    else:
        q, k, v = (torch.zeros(size, dtype=dtype) for size in sizes)
    if "expanded" in special:
        k, v = (tensor[:, :1].expand(tensor.shape) for tensor in (k, v))
    if "heads last" in special:
        k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (k, v))
    options = {"return_statistics": "statistics" in special}
    row = torch.zeros(B, H, M)
    tensors = [q, k, v, row]
    options["bias" if function == "sigmoid" else "multiplier"] = row
    if "intervals" in special:
        options["visible"] = torch.zeros(B, M, 2, dtype=torch.int32)
    if "dense" in special:
        options["visible"] = torch.zeros(B, 1, M, N, dtype=torch.bool)
    if special & {"terms", "logit_bias"}:
        options["logit_bias"] = torch.zeros(H, M, N)
    if "terms" in special:
        options |= {"alibi_slopes": torch.zeros(H), "softcap": 30.0, "is_causal": True}
    if special & {"terms", "sinks"} and function == "ssmax":
        options["sinks"] = torch.zeros(H)
    tensors += [x for x in options.values() if isinstance(x, torch.Tensor)]
    if "backward" in special:
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.requires_grad_()
    output = getattr(functional, f"{function}_attention")(q, k, v, **options)
    output = output[0] if isinstance(output, tuple) else output
    if "backward" in special:
        output.backward(torch.zeros_like(output))


def launch(arch: int) -> list[dict]:
    """Each case's launches and the number of its descriptors."""
    stub = stub_cuda.activate(arch)
    found = []
    for case in [*COMMON, *RARE[arch]]:
        before = stub.tensor_maps
        call(*case)
        *case, special = case
        found.append({
            "case": [*case, sorted(special)],
            "launches": [each._asdict() for each in stub.launches()],
            "tensor_maps": stub.tensor_maps - before,
        })  # fmt: skip
    return found


@triton.jit
def _nothing(x):
    pass


def refuse() -> dict[str, str]:
    """What the driver says to calls that a GPU's would refuse, and to their neighbours."""
    stub_cuda.activate(80)
    module = _nothing[(1,)](torch.zeros(1)).asm["cubin"]
    stub_cuda.activate(90)
    _nothing.device_caches.clear()
    utils, x, found = driver.active.utils, torch.zeros(1 << 12, dtype=torch.bfloat16), {}
    encode = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
    more = (0,)  # no NaN beyond the end

    def said(name, step):
        try:
            step()
            found[name] = "taken"
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0]

    def described(address, box, strides, swizzle=3):
        return lambda: encode(address, swizzle, 2, 9, box, [8, 64], strides, *more)

    start = x.data_ptr()
    said("descriptor", described(start, [8, 64], [64, 1]))
    said("address", described(start + 2, [8, 64], [64, 1]))
    said("stride", described(start, [8, 64], [68, 1]))
    said("box", described(start, [257, 64], [64, 1]))
    said("swizzle", described(start, [8, 64], [64, 1], 2))
    said("grid", lambda: _nothing[(1, 65535, 1)](x))
    said("second dimension", lambda: _nothing[(1, 65536, 1)](x))
    said("module of sm_80", lambda: utils.load_binary("_nothing", module, 0, 0))
    return found


def compile_and_count() -> dict[str, dict[str, int]]:
    """Kernels of calls with 300, 301 and 512 keys: as they are counted, and as they compile."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "kernels"))
    import host_cost

    host_cost.GENERATION = (300, 301, 512, 300)
    stub_cuda.activate(90)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        counted = pool.apply(host_cost.count, (host_cost.generate, "ssmax"))
    compiled = stub_cuda.count_compilations()
    host_cost.generate("ssmax")
    return {"counted": counted, "compiled": {name: compiled.count(name) for name in compiled}}


if __name__ == "__main__":
    runs = {"launch": launch, "refuse": refuse, "compile": compile_and_count}
    name, *arch = sys.argv[1:]
    print(json.dumps(runs[name](*map(int, arch))))
