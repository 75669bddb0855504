"""The place of the Triton kernels: `kernels/flash` is installed as `hf_sigmoid.kernels.flash`."""

from pathlib import Path

# A checkout that is not installed: kernels/ lies beside the package's folder.
if (Path(__file__).parents[2] / "kernels" / "flash").is_dir():
    __path__.append(str(Path(__file__).parents[2] / "kernels"))
