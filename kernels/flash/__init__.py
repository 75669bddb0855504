"""Sigmoid attention and SSMax in Triton: `attention`, whose contract is `hf_sigmoid.ops`."""

from hf_sigmoid.kernels.flash.ops import attention

__all__ = ["attention"]
