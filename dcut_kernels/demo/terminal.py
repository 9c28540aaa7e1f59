"""What both demos share: the console, progress bars, and what they ran on."""

from __future__ import annotations

import os
import platform

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .. import __version__, backends

PIPE_WIDTH = 110  # columns when the output goes to a file or a pipe


def make_console() -> Console:
    """Console that is wide enough for the tables where nobody says how wide it is."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


def progress_bar(console: Console) -> Progress:
    """A progress bar that redraws rarely, so that it takes little time from what is measured."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, refresh_per_second=4)


def environment() -> dict[str, str | None]:
    """What the op ran on."""
    return {
        "dcut_kernels": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "backend": backends.chosen("cpu"),
        "backend_detail": backends.explain(),
        "machine": platform.machine(),
    }
