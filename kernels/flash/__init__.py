"""Sigmoid attention and SSMax in Triton: `attention`, whose contract is `hf_sigmoid.ops`."""

from hf_sigmoid.kernels.flash.ops import attention
from hf_sigmoid.kernels.flash.tuning import warn_of_assembler

__all__ = ["attention"]

warn_of_assembler()
