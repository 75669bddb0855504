"""Logit control for an optimiser of your own: QuacK's rates and QK-clip's bound."""

from hf_sigmoid.logit_control.blocks import Heads, find_heads
from hf_sigmoid.logit_control.qk_clip import QKClip
from hf_sigmoid.logit_control.quack import RULES, QuacK

__all__ = ["RULES", "Heads", "QKClip", "QuacK", "find_heads"]
