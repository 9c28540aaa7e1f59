"""Batched speculative decoding on the CPU, small enough to read.

Start with `Engine.step`: draft, select, verify, commit.
"""

from ..models import load_pair
from .costs import bucket_depths, profile
from .engine import Engine, Step
from .requests import Request

__all__ = ["Engine", "Request", "Step", "bucket_depths", "load_pair", "profile"]
