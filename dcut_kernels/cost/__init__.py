"""The measured cost of a step, C(B, K): built, checked, saved, and priced for ``select_and_pack``."""

from .build import additive, captured_cost, from_captured_sizes, from_ratios, interpolate, merge
from .checks import CostTableError, Problem, check, problems
from .envelope import integer_envelope
from .fingerprint import Fingerprint
from .measure import profile
from .rules import AngelSlimRatios, PaperRatios, Rule, TokenCounts
from .table import CostTable

__all__ = [
    "AngelSlimRatios",
    "CostTable",
    "CostTableError",
    "Fingerprint",
    "PaperRatios",
    "Problem",
    "Rule",
    "TokenCounts",
    "additive",
    "captured_cost",
    "check",
    "from_captured_sizes",
    "from_ratios",
    "integer_envelope",
    "interpolate",
    "merge",
    "problems",
    "profile",
]
