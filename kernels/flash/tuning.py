"""Tile sizes and the form of σ, chosen without a measurement at run time.

A table and not an autotuner: nothing is timed at import or at the first call, the same inputs take
the same kernel on every run, and a launch never waits for the GPU. Each row is the largest tile
that Triton 3.9 compiles for its GPUs without spilling a register (`make static` prints and checks
that), at head dims 64 and 128 in 16 bits and no optional term. None has been timed yet.
"""

import functools
import os
import warnings
from typing import NamedTuple

import torch
import triton
from packaging.version import Version
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.driver import driver


class Tile(NamedTuple):
    """The tile that a kernel cuts its work into.

    Queries and keys of a tile of scores, warps of a program, and stages of its pipelined loop over
    tiles that need no mask (of the one loop that there is, where a call has a mask); stages of the
    loop over the few tiles at the edges; whether a tile's product with its values is delayed until
    the next one's activation can run under it, whether its weights wait for that packed, in the
    inputs' 16 bits, or in 32; whether the loop over full tiles reads by descriptors; whether a
    product of weights is waited for at once (`tiles.dot_of_weights`).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ragged_stages: int = 1
    delay: bool = False
    packed: bool = False
    descriptors: bool = False
    wait: bool = False


# By kernel, or by kernel and function, and by the larger head dim, up to and including the key.
# float32 inputs use no tensor cores (no tf32), and their operands fill registers twice as fast.
FLOAT = {
    "forward": {64: Tile(64, 32, 8, 2), 128: Tile(32, 32, 8, 2), 256: Tile(16, 32, 8, 1)},
    "dq": {64: Tile(32, 32, 8, 2), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)},
    "dkdv": {64: Tile(32, 32, 8, 2), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)},
    "decode": {64: Tile(16, 64, 4, 2), 128: Tile(16, 32, 4, 2), 256: Tile(16, 16, 4, 1)},
}
# 16 bits, on every GPU that has no table of its own: 99 kB of shared memory (sm_86, 89, 120), and
# products by mma.sync, whose operands lie in registers beside the accumulators. At dim 128 dkdv has
# 64 queries by 64 keys: with 32 queries it would compute its scores twice, with 128 keys it spills.
# "terms" is for calls with softcap, ALiBi, a mask, a logit_bias (whose tiles lie in shared memory,
# 4 bytes a score and stage) or statistics.
HALF = {
    "forward": {
        64: Tile(128, 64, 8, 2),
        128: Tile(128, 64, 8, 2, ragged_stages=2),
        256: Tile(64, 32, 8, 2),
    },
    "dq": {64: Tile(128, 32, 8, 2), 128: Tile(128, 32, 8, 2), 256: Tile(64, 32, 8, 1)},
    "dkdv": {64: Tile(32, 128, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 8, 1)},
    "decode": {64: Tile(16, 128, 4, 3), 128: Tile(16, 64, 4, 3), 256: Tile(16, 32, 4, 2)},
}
HALF |= {
    ("forward", "terms"): HALF["forward"] | {128: Tile(128, 32, 8, 2)},
    ("dq", "terms"): HALF["dq"] | {128: Tile(128, 16, 8, 2)},
}
AMPERE = HALF | {"dq": HALF["dq"] | {64: Tile(128, 64, 8, 2)}}
# Products are asynchronous: one tile's activation runs under the product of the last one's weights
# with its values. Weights that wait in 32 bits cost no instruction, packed ones half of one a score
# but also half of the registers. At dim 128 with 128 keys 32 bits fit only where the copy engine
# reads, for which a thread needs no addresses; by pointers they are packed. ssmax, which rescales
# too, has 64 keys there.
HOPPER = HALF | {
    "forward": HALF["forward"]
    | {
        64: Tile(128, 128, 8, 2, ragged_stages=2, delay=True),
        128: Tile(128, 128, 8, 2, delay=True, packed=True),
    },
    ("forward", "ssmax"): HALF["forward"]
    | {64: Tile(128, 128, 8, 2, delay=True, packed=True), 128: Tile(128, 64, 8, 2, delay=True)},
    ("forward", "sigmoid", "described"): {
        64: Tile(128, 128, 8, 2, ragged_stages=2, delay=True),
        128: Tile(128, 128, 8, 2, ragged_stages=2, delay=True, descriptors=True),
    },
    ("forward", "terms"): HALF["forward"]
    | {64: Tile(128, 64, 8, 2, delay=True), 128: Tile(128, 64, 8, 2, delay=True)},
    "dq": HALF["dq"] | {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2)},
    ("dq", "terms"): HALF["dq"] | {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2)},
    "dkdv": HALF["dkdv"] | {128: Tile(32, 128, 8, 2)},
    ("dkdv", "terms"): HALF["dkdv"] | {128: Tile(16, 128, 8, 2)},
    # Without addresses in registers twice as many queries fit: 15 % fewer instructions a score.
    ("dkdv", "sigmoid", "described"): {64: Tile(64, 128, 8, 2, descriptors=True)},
}
# Until 3.7.1 Triton lets products read what copies by pointers wrote without the fence between them
# that PTX asks for: such a loop has one stage, or reads by descriptors, which need none.
FENCES_COPIES = Version(triton.__version__) >= Version("3.7.1")
# Until 3.9 Triton needs more registers there: 60 to 230 bytes spilled.
if Version(triton.__version__) < Version("3.9"):
    HOPPER["dkdv"] = HOPPER["dkdv"] | {128: Tile(16, 128, 8, 2)}
# Accumulators lie in tensor memory, and pass through registers a few columns at a time.
BLACKWELL = HALF | {
    "forward": HALF["forward"] | {64: Tile(128, 128, 8, 2), 128: Tile(128, 128, 8, 2)},
    ("forward", "terms"): HALF["forward"] | {128: Tile(128, 64, 8, 2)},
    "dq": HALF["dq"] | {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2)},
    ("dq", "terms"): HALF["dq"] | {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2)},
    "dkdv": HALF["dkdv"] | {128: Tile(32, 64, 8, 2)},
    ("dkdv", "sigmoid"): HALF["dkdv"] | {64: Tile(64, 64, 4, 2), 128: Tile(32, 64, 8, 2)},
}
# 64 kB of shared memory, and wavefronts of 64: more than four would compute scores twice.
CDNA = {
    "forward": {64: Tile(128, 64, 4, 2), 128: Tile(128, 64, 4, 2), 256: Tile(64, 32, 4, 1)},
    "dq": {64: Tile(128, 32, 4, 2), 128: Tile(128, 32, 4, 2), 256: Tile(64, 32, 4, 1)},
    "dkdv": {64: Tile(16, 128, 4, 1), 128: Tile(16, 64, 4, 1), 256: Tile(16, 32, 4, 1)},
    "decode": {64: Tile(16, 64, 4, 2), 128: Tile(16, 64, 4, 2), 256: Tile(16, 32, 4, 1)},
}
CDNA_FLOAT = FLOAT | {
    "forward": {64: Tile(64, 32, 4, 1), 128: Tile(64, 32, 4, 1), 256: Tile(64, 16, 4, 1)},
    "dq": {64: Tile(64, 32, 4, 1), 128: Tile(64, 16, 4, 1), 256: Tile(64, 16, 4, 1)},
    "dkdv": {64: Tile(16, 64, 4, 1), 128: Tile(16, 64, 4, 1), 256: Tile(16, 32, 4, 1)},
}
TABLES = {80: AMPERE, 90: HOPPER, 100: BLACKWELL, 103: BLACKWELL, "gfx942": CDNA, "gfx950": CDNA}

# Below this many keys a call is too short for a second kernel to pay.
LEAST_KEYS_TO_SPLIT = 256
# A share of keys is at least so many tiles, or its partial result costs more than it saves.
LEAST_TILES_OF_A_SPLIT = 2
MOST_SPLITS = 128  # shares that `_combine` reads at once

# float16 weights are multiplied by 2^15, which is what it can hold of a weight of 1. Then weights
# down to 2^-29 are normal numbers, and half of one is lost below 2^-39.
HALF_SCALE = 15


def tile(
    kernel: str,
    function: str,
    dtype: torch.dtype,
    dim: int,
    described: bool = False,
    terms: bool = False,
) -> Tile:
    """The tile of "forward", "dq", "dkdv" or "decode" for `dtype` and head dims up to `dim`.

    `described` says that the keys and values are `tiles.is_describable`, `terms` that the call has
    softcap, ALiBi, a mask, a logit_bias or statistics.
    """
    backend, arch = _target()
    if dtype.itemsize == 2:
        table = TABLES.get(arch, CDNA if backend == "hip" else HALF)
    else:
        table = CDNA_FLOAT if backend == "hip" else FLOAT
    waits = table is HOPPER and not keeps_registers()
    unfenced = table is HOPPER and not FENCES_COPIES
    names = [(kernel, function), kernel]
    if terms:
        names = [(kernel, "terms"), *names]
    elif described and not waits:
        names = [(kernel, function, "described"), *names]
    for name in names:
        for limit, sizes in table.get(name, {}).items():
            if dim <= limit:
                if waits:
                    sizes = sizes._replace(delay=False, packed=False, wait=True)
                if unfenced and not sizes.descriptors:
                    described = described and not terms and kernel != "decode"
                    stages = sizes.num_stages if described else 1
                    sizes = sizes._replace(
                        num_stages=stages, ragged_stages=1, descriptors=described
                    )
                return sizes
    raise ValueError(f"no tile for {kernel} with head dims of {dim}")


@functools.lru_cache(maxsize=1024)
def splits(programs: int, key_tiles: int) -> int:
    """Into how many shares decoding splits its keys.

    Programs run in waves of two a multiprocessor, and each takes as long as its share and about one
    tile more, to begin and to write. So the time is waves x (tiles of a share + 1); the fewest
    shares of those that are within 2 % of the least.
    """
    slots = 2 * multiprocessors()

    def time(shares: int) -> int:
        return triton.cdiv(programs * shares, slots) * (triton.cdiv(key_tiles, shares) + 1)

    most = max(1, min(MOST_SPLITS, key_tiles // LEAST_TILES_OF_A_SPLIT))
    least = min(time(shares) for shares in range(1, most + 1))
    return next(shares for shares in range(1, most + 1) if time(shares) <= 1.02 * least)


def parts(programs: int, heads: int) -> int:
    """Into how many parts the dk-dv kernel splits the query heads of a group.

    One, unless its programs leave multiprocessors idle; then the fewest that do not, of those that
    divide the heads.
    """
    divisors = [part for part in range(1, heads + 1) if heads % part == 0]
    enough = [part for part in divisors if programs * part >= multiprocessors()]
    return enough[0] if enough else heads


def form(dtype: torch.dtype) -> str:
    """The form of σ (`tiles.sigmoid`): accurate ones by default, by what the GPU is short of.

    float32 inputs, AMD and the interpreter take "rsqrt": the error of the others would show in
    float32, and on AMD inline PTX compiles without an error and is missing from the code. 16-bit
    inputs take "pair" on NVIDIA GPUs, and on sm_100 and sm_103, where special functions bind and
    float32 products come two at a time, "halley".

    HF_SIGMOID_FORM=tanh takes tanh.approx where "pair" is the accurate one, with two thirds of its
    special functions. Its error is absolute: PTX allows one that is half of a weight of 1/2048. Use
    it for short contexts, and compare.
    """
    asked = os.environ.get("HF_SIGMOID_FORM", "accurate")
    if asked not in ("accurate", "tanh"):
        raise ValueError(f"HF_SIGMOID_FORM must be accurate or tanh, got {asked!r}")
    backend, arch = _target()
    if dtype.itemsize != 2 or backend != "cuda":
        return "rsqrt"
    accurate = "halley" if arch in (100, 103) else "pair"
    return "tanh" if asked == "tanh" and accurate == "pair" else accurate


def scale(function: str, dtype: torch.dtype, form: str) -> int:
    """Power of two by which weights are multiplied before their product with values.

    float16 has no small numbers: weights of sigmoid are of size 1/n. bfloat16 has float32's range,
    and two forms of σ give its multiple for less than itself.
    """
    if dtype == torch.float16:
        return HALF_SCALE
    scaled = function == "sigmoid" and dtype == torch.bfloat16 and form in ("pair", "halley")
    return 60 if scaled else 0


@functools.cache
def keeps_registers() -> bool:
    """Does the assembler for Hopper keep the registers that an asynchronous product reads?

    Before CUDA 13.3 it may use them again before they are read, and the product is wrong
    (triton-lang/triton pull request 11781). Triton 3.9 has a later one; before it
    TRITON_PTXAS_PATH can name one.
    """
    return Version(get_ptxas(90).version) >= Version("13.3")


def warn_of_assembler() -> None:
    """On Hopper, say that an old assembler costs speed: its products are waited for at once."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return
    if not keeps_registers():
        warnings.warn(
            f"Triton {triton.__version__} assembles for Hopper with ptxas {get_ptxas(90).version}, "
            "which can corrupt asynchronous matrix products: the kernels wait for each of them. "
            "For full speed install triton>=3.9, or set TRITON_PTXAS_PATH to a ptxas of CUDA 13.3 "
            "or newer",
            stacklevel=2,
        )


def _target() -> tuple[str, int | str]:
    """Backend and architecture of the current device."""
    if knobs.runtime.interpret:
        return "interpreter", 0
    target = driver.active.get_current_target()
    return target.backend, target.arch


def multiprocessors() -> int:
    """The number on the current device; an H100's where there is none."""
    if not torch.cuda.is_available():
        return 132
    return _count(torch.cuda.current_device())


@functools.cache
def _count(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
