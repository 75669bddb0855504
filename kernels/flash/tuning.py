from typing import NamedTuple
import torch
from triton import knobs
from triton.runtime import driver

class Tile(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

def tile(kernel, dtype, dim):
    return Tile(64, 64, 4, 2)

def form(dtype):
    return "rsqrt"
