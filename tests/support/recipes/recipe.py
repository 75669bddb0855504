"""What one model type needs besides the tables that fit all."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Recipe:
    """`config` overrides fields, a dict for a part going into that part; `inputs` makes them."""

    config: dict = field(default_factory=dict)
    inputs: Callable | None = None  # from the config to the keyword arguments of forward
