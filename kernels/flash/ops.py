"""The Triton kernels as a differentiable operator, `torch.ops.hf_sigmoid.flash_forward`."""

from hf_sigmoid.kernels.flash.backward import backward
from hf_sigmoid.kernels.flash.forward import forward
from hf_sigmoid.ops import define

attention = define("flash", forward, backward)
