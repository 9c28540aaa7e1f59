"""What users set, and what of vLLM the plugin relies on."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn

from ...cost import CostTable

logger = logging.getLogger("vllm.dcut")  # vLLM shows what is logged under its own name


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
        Every `floor_every` steps, unless that is 0, each request keeps at least `floor` drafts.
    costs : str, optional
        A saved cost table instead of one that is measured at startup.
    """

    policy: Literal["argmax", "early_stop"] | None = None
    latency_ms: float | None = None
    floor: int = 1
    floor_every: int = 0
    costs: str | None = None

    def __post_init__(self) -> None:
        latency = self.latency_ms
        if latency is not None and not (isinstance(latency, int | float) and latency > 0 and latency is not True):
            self._refuse("latency_ms", "a number above 0")
        if self.policy not in (None, "argmax", "early_stop"):
            self._refuse("policy", "argmax or early_stop")
        for name in ("floor", "floor_every"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                self._refuse(name, "an int from 0 on")
        if self.costs is not None and not isinstance(self.costs, str):
            self._refuse("costs", "the path of a cost table")

    def _refuse(self, name: str, expected: str) -> NoReturn:
        raise ValueError(f"dcut: {name}: expected {expected}, got {getattr(self, name)!r}")

    def table(self) -> CostTable | None:
        """The user's cost table, if there is one."""
        try:
            return None if self.costs is None else CostTable.load(self.costs)
        except (OSError, ValueError) as error:
            raise ValueError(f"dcut: costs: expected the path of a cost table, got {self.costs!r}: {error}") from None

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


def difference(owner: Any, functions: Mapping[str, str]) -> str | None:
    """How vLLM differs from what this was written for, None if it does not.

    Parameters
    ----------
    owner : module or class
    functions : mapping of str to str
        Dotted names in it, with the names of all parameters in order, but for self.  After ``...`` come some, anywhere
        in the signature, of a function whose other parameters do not matter.
    """
    for name, parameters in functions.items():
        function: Any = functools.reduce(lambda place, part: getattr(place, part, None), name.split("."), owner)
        if not callable(function):
            return f"{name}: expected a function, got none"
        got = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
        exact, _, some = parameters.partition("...")
        if not (set(some.split()) <= set(got) if "..." in parameters else exact.split() == got):
            return f"{name}: expected parameters {parameters or 'none'}, got {' '.join(got) or 'none'}"
    return None


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function of vLLM by ``around(function, *arguments)``, once."""
    original = getattr(owner, name)
    if hasattr(original, "dcut"):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapped.dcut = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
