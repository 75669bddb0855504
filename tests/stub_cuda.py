"""Triton's real launches without a GPU: a driver that checks what it is asked and runs nothing.

`activate(arch)` builds libcuda out of stub_cuda.c, with a C compiler, and hands it to Triton.
From then on `kernel[grid](...)` on CPU tensors compiles for that chip, encodes descriptors and
launches as on a GPU, and raises RuntimeError where the driver would refuse. Nothing is computed:
outputs hold what `empty` left. It is for a process of its own: what it changes stays changed.

`count_variants()` counts what would compile, in microseconds and without compiling it.
`compile_only(arch)` compiles and neither loads nor launches: for filling Triton's cache.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # read when a kernel is defined

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, KernelInterface

# Shared memory that one program may have, in bytes, and multiprocessors: an A100, H200, B200 and
# RTX PRO 6000 (CUDA C++ Programming Guide, table of compute capabilities).
CHIPS = {80: (166912, 108), 90: (232448, 132), 100: (232448, 148), 120: (101376, 188)}
KEPT = 4096  # launches that the driver remembers


class Launch(NamedTuple):
    """One launch as the driver got it."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char * 64),
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint),
        ("shared", ctypes.c_uint),
    )


class Driver:
    """The stub's own counters."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library

    def launches(self) -> list[Launch]:
        """What was launched since the last call."""
        count = ctypes.c_int.in_dll(self._library, "stub_launches")
        assert count.value <= KEPT, "more launches than the stub remembers"
        kept = (_Launch * KEPT).in_dll(self._library, "stub_launched")
        found = [
            Launch(each.kernel.decode(), tuple(each.grid), each.threads, each.shared)
            for each in kept[: count.value]
        ]
        count.value = 0
        return found

    @property
    def tensor_maps(self) -> int:
        """How many descriptors were encoded."""
        return ctypes.c_int.in_dll(self._library, "stub_tensor_maps").value


def build(folder: Path) -> Path:
    """Compile the driver; FileNotFoundError if there is no C compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("the stub driver needs a C compiler: install gcc, or set CC")
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library = folder / "libcuda.so.1"
    source = Path(__file__).with_suffix(".c")
    command = [compiler, "-shared", "-fPIC", "-O1", f"-I{include}", source, "-o", library]
    subprocess.run([*command, "-Wl,-soname,libcuda.so.1"], check=True)
    return library


@functools.cache
def load() -> ctypes.CDLL:
    """The driver, in place of any other that Triton would find."""
    folder = tempfile.TemporaryDirectory()
    # Loaded before Triton asks for it: a library of that name is not searched for again.
    library = ctypes.CDLL(str(build(Path(folder.name))), mode=ctypes.RTLD_GLOBAL)
    library.folder = folder  # kept: Triton links its own module with what lies there
    os.environ["TRITON_LIBCUDA_PATH"] = folder.name
    return library


def activate(arch: int) -> Driver:
    """Launch on a stub of one of CHIPS, in this process from now on."""
    library = load()
    shared, multiprocessors = CHIPS[arch]
    for name, value in (("arch", arch), ("shared", shared), ("multiprocessors", multiprocessors)):
        ctypes.c_int.in_dll(library, f"stub_{name}").value = value

    from triton.backends.nvidia import driver as nvidia

    class StubDriver(nvidia.CudaDriver):
        def __init__(self):
            self.utils, self.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
            self.get_device_capability = lambda device=0: divmod(arch, 10)
            self.set_current_device = lambda device: None
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda device=None: 0

    driver.set_active(StubDriver())
    _serve_cpu_tensors(multiprocessors)
    return Driver(library)


def compile_only(arch: int) -> None:
    """Compile launches on CPU tensors into Triton's cache, in this process from now on.

    Releases of Triton that build a module of C for every signature of arguments build it too: with
    the machine's driver, or with the stub where there is none.
    """
    from triton.backends.nvidia import driver as nvidia

    _, multiprocessors = CHIPS[arch]
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", arch, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
        )
    )
    builds_modules = hasattr(nvidia, "make_launcher")
    if builds_modules:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            load()

    def launch(kernel, grid, *args, **options):
        compiled = kernel.warmup(*args, grid=grid, **options)
        if builds_modules:
            nvidia.CudaLauncher(compiled.src, compiled.metadata)
        return compiled

    KernelInterface.__getitem__ = lambda kernel, grid: functools.partial(launch, kernel, grid)
    _serve_cpu_tensors(multiprocessors)


def _serve_cpu_tensors(multiprocessors: int) -> None:
    """Let CPU tensors stand in for a GPU's wherever a backend or a number of programs is chosen."""
    from hf_sigmoid import functional
    from hf_sigmoid.kernels.flash import tuning

    functional._choose = lambda *args, **kwargs: "triton"
    tuning.multiprocessors = lambda *args: multiprocessors


def count_variants() -> dict[str, set]:
    """From now on launches are counted, {kernel: its specialisations}, and nothing compiles."""
    seen = defaultdict(set)
    nothing = SimpleNamespace(
        launch_metadata=lambda *args: None,
        function=0,
        packed_metadata=(4, 1, 0),
        run=lambda *args, **kwargs: None,
    )

    def do_compile(self, key, signature, device, *rest, **more):
        seen[self.__name__].add(key)
        self.device_caches[device][0][key] = nothing
        return nothing

    JITFunction._do_compile = do_compile
    return seen


def count_compilations() -> list[str]:
    """From now on names of the kernels that compile because the cache has none are added."""
    compiled = []

    def listen(*, src, cache_hit, **more):
        if not cache_hit:
            compiled.append(src.name)

    triton.knobs.compilation.listener = listen
    return compiled
