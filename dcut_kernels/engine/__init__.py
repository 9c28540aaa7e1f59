"""Batched speculative decoding on the CPU, small enough to read.

Start with `Engine.step`: draft, select, verify, commit.
"""

from ..models import load_pair
from .compare import Comparison, compare
from .costs import StepCosts, profile
from .engine import Engine, Step
from .requests import Request

__all__ = ["Comparison", "Engine", "Request", "Step", "StepCosts", "compare", "load_pair", "profile"]
