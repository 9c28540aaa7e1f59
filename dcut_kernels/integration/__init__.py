"""What an engine implements to have its verification batches packed by this package."""

from .protocol import Drafts, SpeculativeEngine, select

__all__ = ["Drafts", "SpeculativeEngine", "select"]
