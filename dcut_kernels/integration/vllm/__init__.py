"""D-cut in vLLM, unmodified: a plugin that trims the drafts of each step before they are verified.

vLLM loads it in every process through the entry point ``vllm.general_plugins``.  It does nothing unless an engine is
made with ``additional_config={"dcut": True}``, or with a dict of `options.Options` in place of True.
"""

from __future__ import annotations

NAME = "dcut"


def register() -> None:
    """Prepare this process; engines that are not switched on stay as they are.  Repeated calls change nothing."""
    from . import v1

    v1.install()
    try:
        from . import v2
    except ImportError:  # a vLLM whose V2 runner verifies all drafts
        return
    v2.install()
