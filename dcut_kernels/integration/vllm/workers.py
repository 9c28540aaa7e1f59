"""Where workers of vLLM start: a runner's part of the plugin is imported there, if its engine is switched on."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.worker_base import WorkerWrapperBase

from .options import Options, difference, logger, wrap

WRAPPER = {"init_device": "", "init_worker": "all_kwargs"}  # the latter sets what is read here


def install() -> None:
    """Look at each worker before its runner is made, and after its graphs are captured."""
    if (reason := difference(WorkerWrapperBase, WRAPPER)) is not None:
        logger.warning("dcut: cannot be used with this vLLM: %s", reason)
        return
    if not hasattr(WorkerWrapperBase, "compile_or_warm_up_model"):  # it hands on what it does not know
        WorkerWrapperBase.compile_or_warm_up_model = lambda self: self.worker.compile_or_warm_up_model()
    wrap(WorkerWrapperBase, "init_device", _init_device)
    wrap(WorkerWrapperBase, "compile_or_warm_up_model", _warm_up)


def _init_device(original: Any, wrapper: Any) -> Any:
    if Options.of(wrapper.vllm_config) is not None:
        try:
            from . import v2
        except ImportError as error:
            logger.warning("dcut: no part for the V2 runner with this vLLM: %s", error)
        else:
            v2.install()
    return original(wrapper)


def _warm_up(original: Any, wrapper: Any) -> Any:
    times, options = original(wrapper), Options.of(wrapper.vllm_config)
    if options is not None:
        try:
            from . import v1

            v1.attach(wrapper.worker.model_runner, options)
        except (ImportError, AttributeError, TypeError) as error:
            logger.warning("dcut: not used, drafts are verified in full: this vLLM is another one: %s", error)
    return times
