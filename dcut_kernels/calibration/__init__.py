"""Calibrated confidences: fits from what verification accepted, compiled into the table ``calibration``."""

from .feedback import Feedback, Report, feedback, report
from .isotonic import PiecewiseLinear, fit_isotonic, isotonic_regression
from .logistic import OnlineLogistic
from .rates import PositionRates
from .table import Calibration, Curve, apply, calibrated_q, compile_table
from .temperature import DraftLogits, fit_temperatures

__all__ = [
    "Calibration",
    "Curve",
    "DraftLogits",
    "Feedback",
    "OnlineLogistic",
    "PiecewiseLinear",
    "PositionRates",
    "Report",
    "apply",
    "calibrated_q",
    "compile_table",
    "feedback",
    "fit_isotonic",
    "fit_temperatures",
    "isotonic_regression",
    "report",
]
