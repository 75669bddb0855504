"""What a call costs the host, and how many kernels compile: measured without a GPU.

    python kernels/host_cost.py            # a table
    python kernels/host_cost.py --json     # the same, for a program

The stub driver (tests/stub_cuda.py) runs nothing, so the time of a call is that of Python, torch
and Triton's launcher. Shapes are a 7B model's: 32 query heads, 8 key heads, D 128, bf16.

    launches     Triton kernels that one call starts
    torch ops    torch's operators in one call that start a kernel on a GPU: no views or allocations
                 (abs, ne, eq, mul, all and `_local_scalar_dense` look at the bias on a CPU only)
    µs           of the host, median of --calls calls: `op` is the operator of the kernels, `verb`
                 the public function, `transformers` the function that transformers calls
    variants     kernels that compile in one generation from 256 to 4096 keys (its prefill, then a
                 call at every length), and in training at 64 lengths, both passes
"""

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

import prewarm  # noqa: F401 puts the checkout's folders on the path
import stub_cuda  # before the kernels are defined
import torch
from torch.utils._python_dispatch import TorchDispatchMode

B, H, G, D = 1, 32, 8, 128
FUNCTIONS = ("sigmoid", "ssmax")
GENERATION = range(256, 4097)
# Odd, even and multiples of 16, short and long, in no order, as batches come.
TRAINING = [17 + 613 * i % 3000 for i in range(48)] + [16 * (1 + 7 * i) for i in range(16)]
# Operators that start no kernel, beside views and allocations.
IDLE = ("lift_fresh", "detach", "promote_types")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=int, choices=stub_cuda.CHIPS, default=90)
    parser.add_argument("--calls", type=int, default=200, help="timed calls")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--variants-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variants_only:
        print(json.dumps(variants(options.arch)))
        return
    # Counting replaces the compiler: in another process.
    command = [sys.executable, __file__, "--variants-only", "--arch", str(options.arch)]
    counted = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {"variants": json.loads(counted.stdout), "decode": decode(options.arch, options.calls)}
    if options.json:
        print(json.dumps(found))
        return
    for what, kernels in found["variants"].items():
        each = ", ".join(f"{name} {count}" for name, count in kernels.items())
        print(f"variants, {what:20}{sum(kernels.values()):4}   {each}")
    for function, costs in found["decode"].items():
        times = ", ".join(f"{name} {us:.0f} µs" for name, us in costs["us"].items())
        print(f"one query over 4096 keys, {function}: {times}")
        for key in ("launches", "torch ops"):
            each = ", ".join(f"{name} {n}" for name, n in costs[key].items())
            print(f"    {key:10}{sum(costs[key].values()):4}   {each}")


def tensors(M: int, N: int, batch: int = B, differentiates: bool = False) -> list[torch.Tensor]:
    """q, k, v that hold nothing yet."""
    sizes = ((batch, H, M, D), (batch, G, N, D), (batch, G, N, D))
    return [torch.empty(size, dtype=torch.bfloat16, requires_grad=differentiates) for size in sizes]


def terms(function: str, log_n: torch.Tensor) -> dict:
    return {"bias": -log_n} if function == "sigmoid" else {"multiplier": 0.2 * log_n}


def verb(function: str):
    from hf_sigmoid import functional

    return getattr(functional, f"{function}_attention")


def variants(arch: int) -> dict[str, dict[str, int]]:
    """{run: {kernel: how many of it compile}}, each run in a process that has compiled nothing."""
    stub_cuda.activate(arch)
    runs = [(run, function) for function in FUNCTIONS for run in (generate, train)]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        counts = pool.starmap(count, runs, chunksize=1)
    names = [f"{function} {run.__name__}" for run, function in runs]
    return dict(zip(names, counts, strict=True))


def count(run: Callable, function: str) -> dict[str, int]:
    seen = stub_cuda.count_variants()
    run(function)
    return {kernel: len(keys) for kernel, keys in seen.items()}


@torch.no_grad()
def generate(function: str) -> None:
    for N in GENERATION:
        M = N if GENERATION[0] == N else 1
        log_n = torch.full((B, 1, M), float(N)).log()
        verb(function)(*tensors(M, N), **terms(function, log_n), is_causal=True)


def train(function: str) -> None:
    for N in TRAINING:
        log_n = torch.arange(1, N + 1).float().log().expand(2, H, N).contiguous()
        call = terms(function, log_n.requires_grad_())
        output = verb(function)(*tensors(N, N, 2, True), **call, is_causal=True)
        output.backward(torch.empty_like(output))


class Operators(TorchDispatchMode):
    """Counts torch's operators that start a kernel on a GPU, in our operator's body too."""

    def __init__(self):
        super().__init__()
        self.launching = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if func.namespace == "hf_sigmoid":
            from hf_sigmoid.kernels.flash import ops

            with self:
                return ops.forward(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in name and name not in IDLE:
            self.launching[name] += 1
        return func(*args, **(kwargs or {}))


def decode(arch: int, calls: int) -> dict[str, dict]:
    """{function: launches, torch's operators and microseconds of one query over 4096 keys}."""
    stub = stub_cuda.activate(arch)
    return {function: decode_costs(function, stub, calls) for function in FUNCTIONS}


@torch.no_grad()
def decode_costs(function: str, stub: stub_cuda.Driver, calls: int) -> dict:
    from transformers import AttentionInterface

    from hf_sigmoid.kernels import flash

    N = GENERATION[-1]
    q, k, v = tensors(1, N)
    module, interval = layer(function), torch.tensor([[[[0, N]]]], dtype=torch.int32)
    registered = AttentionInterface()[function]
    log_n = torch.full((B, 1, 1), float(N)).log()
    row = log_n.expand(B, H, 1).contiguous()
    arguments = (q, k, v, row, interval[0], None, None, None, None, function, D**-0.5, 0.0, 0.0, 0)
    small = torch.zeros(8)
    steps = {
        "a small torch op": lambda: small.add(small),
        "op": lambda: flash.attention(*arguments, False),
        "verb": lambda: verb(function)(q, k, v, visible=interval, **terms(function, log_n)),
        "transformers": lambda: registered(module, q, k, v, interval, scaling=D**-0.5),
    }
    times = {}
    for name, step in steps.items():
        for _ in range(10):  # compiles
            step()
        spent = []
        for _ in range(calls):
            start = time.perf_counter()
            step()
            spent.append(time.perf_counter() - start)
            if len(spent) % 100 == 0:
                stub.launches()
        times[name] = statistics.median(spent) * 1e6
    stub.launches()
    steps["transformers"]()
    launches = Counter(each.kernel for each in stub.launches())
    with Operators() as operators:
        steps["transformers"]()
    return {
        "us": times,
        "launches": dict(launches),
        "torch ops": dict(operators.launching),
    }


def layer(function: str) -> torch.nn.Module:
    """A llama's attention module as the plugin converts it, `log_length` included."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import hf_sigmoid

    config = LlamaConfig(
        vocab_size=8, hidden_size=H * D, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=H, num_key_value_heads=G,
    )  # fmt: skip
    hf_sigmoid.configure(config, function, offset=0.0, slope=-1.0)
    config._attn_implementation = function
    with torch.device("meta"):
        module = LlamaForCausalLM(config).model.layers[0].self_attn
    module.log_length.to_empty(device="cpu")
    return module.eval()


if __name__ == "__main__":
    main()
