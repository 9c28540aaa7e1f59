"""D-cut in vLLM, unmodified: a plugin that trims the drafts of each step before they are verified.

vLLM loads it in every process through the entry point ``vllm.general_plugins``.  It does nothing unless an engine is
made with ``additional_config={"dcut": True}``, or with a dict of `options.Options` in place of True; only then are the
runners' parts imported.
"""

from __future__ import annotations

import importlib

from .options import logger

PARTS = ("workers", "metrics")


def register() -> None:
    """Prepare this process; engines that are not switched on stay as they are.  Repeated calls change nothing."""
    for part in PARTS:
        try:
            importlib.import_module(f".{part}", __name__).install()
        except ImportError as error:  # vLLM moves what it does not promise
            logger.warning("dcut: no %s with this vLLM: %s", part, error)
