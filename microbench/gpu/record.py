"""The results of one part, on disk as soon as they are known."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Record:
    """One part's entry of the results file: what is assigned is in the file when the assignment returns.

    Parameters
    ----------
    path : Path
        The JSON file that all parts share; they run one after another.
    part : str
        Whose entry this is.
    """

    def __init__(self, path: Path, part: str) -> None:
        self.path, self.part = path, part

    def _all(self) -> dict[str, dict[str, Any]]:
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    def read(self) -> dict[str, Any]:
        return self._all().get(self.part, {})

    def _write(self, entry: dict[str, Any]) -> None:
        text = json.dumps(self._all() | {self.part: entry}, indent=1) + "\n"
        partial = self.path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self.path)  # a process that is stopped leaves the last complete file

    def clear(self) -> None:
        self._write({})

    def __setitem__(self, name: str, value: Any) -> None:
        self._write(self.read() | {name: value})


def run(stage: str, work: Callable[[Record, argparse.Namespace], bool], *choices: str) -> int:
    """The command line of a part: ``--record FILE`` and perhaps one of `choices`; 0 if `work` is content, else 1."""
    parser = argparse.ArgumentParser()
    if choices:
        parser.add_argument("which", choices=choices)
    parser.add_argument("--record", type=Path, required=True)
    args = parser.parse_args()
    record = Record(args.record, f"{stage}-{args.which}" if choices else stage)
    return 0 if work(record, args) else 1
