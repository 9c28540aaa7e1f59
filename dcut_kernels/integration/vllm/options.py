"""What users set, and what of vLLM the plugin relies on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True)
class Options:
    """Values of ``additional_config["dcut"]``.

    Attributes
    ----------
    policy : {"argmax", "early_stop"}, optional
        As in `dcut_kernels.select_and_pack`; by default "argmax", and "early_stop" where drafts are sampled.
    latency_ms : float, optional
        Steps that take longer are not chosen.
    floor, floor_every : int
        Every so many steps each request keeps at least so many drafts.
    costs : str, optional
        A saved cost table instead of one that is measured at startup.
    """

    policy: Literal["argmax", "early_stop"] | None = None
    latency_ms: float | None = None
    floor: int = 1
    floor_every: int = 0
    costs: str | None = None

    @classmethod
    def of(cls, config: Any) -> Options | None:
        """Options of a ``VllmConfig``; None where the plugin is not switched on."""
        extra = config.additional_config
        value = extra.get("dcut") if isinstance(extra, Mapping) else None
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        names = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping):
            raise ValueError(f"dcut: expected True, False or a dict of {', '.join(names)}, got {value!r}")
        if unknown := sorted(set(value) - set(names)):
            raise ValueError(f"dcut: expected keys of {', '.join(names)}, got {unknown[0]!r}")
        return cls(**value)


def changed(function: Callable[..., Any], parameters: str) -> str | None:
    """What is different about a function of vLLM, None if it takes what the plugin was written for.

    Parameters
    ----------
    function : callable
    parameters : str
        Names of its parameters, in order, without self; more may follow if they have defaults.
    """
    expected = parameters.split()
    signature = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    got, rest = [p.name for p in signature[: len(expected)]], signature[len(expected) :]
    if got == expected and all(p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in rest):
        return None
    shown = ", ".join(p.name for p in signature)
    return f"{function.__qualname__}: expected parameters {', '.join(expected) or 'none'}, got {shown or 'none'}"
