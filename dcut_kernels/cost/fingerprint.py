"""What a cost table was measured on."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass

import torch

from ._values import require


@dataclass(frozen=True)
class Fingerprint:
    """What the cost of a step depends on; a table is worth nothing where one of these differs.

    Attributes
    ----------
    device : str
        The accelerator, or the processor and its number of threads.
    model, engine : str
        Target and drafter, and the engine with its version.
    dtype : str
        Number format of weights and cache.
    parallelism : str
        Such as ``"tp2"``.
    """

    device: str
    model: str
    engine: str
    dtype: str
    parallelism: str = "tp1"

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require(name, isinstance(value, str), "a str", repr(value))

    @classmethod
    def here(cls, model: str, engine: str, dtype: str, parallelism: str = "tp1") -> Fingerprint:
        """Fingerprint of this machine: the current CUDA device if there is one, else the processor."""
        if torch.cuda.is_available():
            device = torch.cuda.get_device_name()
        else:
            device = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
        return cls(device, model, engine, dtype, parallelism)

    def differences(self, other: Fingerprint) -> list[str]:
        """Each field in which another differs, with what was expected and what came."""
        mine, theirs = asdict(self), asdict(other)
        return [f"expected {name} {mine[name]!r}, got {theirs[name]!r}" for name in mine if mine[name] != theirs[name]]
