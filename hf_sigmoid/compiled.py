"""The forward pass on a CPU as one C function, compiled on first use where a compiler is.

It serves calls that record nothing, in float32 and bfloat16, without optional terms. Anything else,
and any machine without a C compiler or without MKL in its PyTorch, takes `cpu.py`: slower, and
equal within rounding. HF_SIGMOID_COMPILE=0 never compiles. The library is kept in
~/.cache/hf_sigmoid (XDG_CACHE_HOME), under a name that says source, compiler and processor.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("compiled.c")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")
PRODUCTS = {torch.float32: "sgemm_", torch.bfloat16: "gemm_bf16bf16f32_"}


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("batch", "head", "row")),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "H", "G", "M", "N", "D", "V", "is_ssmax",
                                              "is_bf16", "threads")),
        *((name, _Matrix) for name in ("query", "key", "value", "output")),
        ("row", ctypes.c_void_p),
        ("intervals", ctypes.c_void_p),
        ("log_sum_exp", ctypes.c_void_p),
        ("scaling", ctypes.c_float),
        ("gemm", ctypes.c_void_p),
        ("set_threads", ctypes.c_void_p),
    )  # fmt: skip


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Can the compiled function take these tensors, on this machine?"""
    tensors = (query, key, value)
    return (
        query.dtype in PRODUCTS
        and all(tensor.is_cpu and _has_plain_rows(tensor) for tensor in tensors)
        and library() is not None
    )


def forward(
    query: Tensor, key: Tensor, value: Tensor, row: Tensor, intervals: Tensor, function: str,
    scaling: float, output: Tensor, log_sum_exp: Tensor,
) -> None:  # fmt: skip
    """Fill `output`, of ssmax `log_sum_exp` too; arguments as in `ops.define` if `serves` holds."""
    compiled, products = library()
    B, H, M, D = query.shape
    G, N, V = value.shape[1:]
    row, intervals = row.contiguous(), intervals.contiguous()
    call = _Call(
        B, H, G, M, N, D, V, function == "ssmax", query.dtype == torch.bfloat16,
        torch.get_num_threads(), *map(_matrix, (query, key, value, output)), row.data_ptr(),
        intervals.data_ptr(), log_sum_exp.data_ptr(), scaling, products[query.dtype],
        products["threads"],
    )  # fmt: skip
    if B * H * M and compiled.attention(ctypes.byref(call)):
        raise MemoryError("no memory for a tile of weights")


@functools.cache
def library() -> tuple[ctypes.CDLL, dict] | None:
    """The compiled function and the addresses of MKL's that it calls; None where they are not."""
    if os.environ.get("HF_SIGMOID_COMPILE") == "0":
        return None
    try:
        mkl = ctypes.CDLL(torch._C.__file__)
        names = {**PRODUCTS, "threads": "MKL_Set_Num_Threads_Local"}
        address = {
            key: ctypes.cast(getattr(mkl, name), ctypes.c_void_p).value
            for key, name in names.items()
        }
        compiled = ctypes.CDLL(str(_build()))
    except (OSError, AttributeError, subprocess.SubprocessError):
        return None
    return compiled, address


def _build() -> Path:
    """The library's file, made if it is not there."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise OSError("no C compiler")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    cpu = Path("/proc/cpuinfo")
    flags = [line for line in cpu.read_bytes().splitlines() if line.startswith(b"flags")][:1]
    threads = _loaded_openmp()
    parts = (SOURCE.read_bytes(), " ".join((*FLAGS, threads)).encode(), version, *flags,
             platform.machine().encode())  # fmt: skip
    name = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_sigmoid"
    file = folder / f"attention-{name}.so"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as new:
            made, part = Path(new, file.name), Path(new, "attention.o")
            for arguments in (
                [*FLAGS, "-c", str(SOURCE), "-o", str(part)],
                ["-shared", str(part), threads, "-o", str(made)],
            ):
                subprocess.run([compiler, *arguments], capture_output=True, check=True, timeout=120)
            made.replace(file)
    return file


def _loaded_openmp() -> str:
    """PyTorch's own OpenMP for the linker: the threads of a second one would be in its way."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return next(
        (line[line.index("/") :] for line in maps if "libgomp" in line and "/" in line), "-lgomp"
    )


def _has_plain_rows(tensor: Tensor) -> bool:
    """Are rows contiguous and apart from each other, as MKL reads them?"""
    return tensor.stride(-1) == 1 and (tensor.shape[2] < 2 or tensor.stride(2) >= tensor.shape[-1])


def _matrix(tensor: Tensor) -> _Matrix:
    batch, head, row, _ = tensor.stride()
    return _Matrix(tensor.data_ptr(), batch, head, max(row, tensor.shape[-1]))
