# SPDX-License-Identifier: Apache-2.0
"""What each of vLLM's processes needs before it works."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time

from vllm_arm import envs
from vllm_arm.logs import get_logger
from vllm_arm.runtime import allocator

logger = get_logger(__name__)

RAY_WORKER = "_VLLM_ARM_RAY_WORKER"
"""Not a setting: marks the processes that Ray starts as workers, which have no parent in Python's sense."""

_SECONDS_TO_SHUT_DOWN = 20
_WATCHER = "vllm-arm-parent-watcher"
# Loaded by now in each process that starts workers for a server.
_EXECUTOR_MODULE = "vllm.v1.executor.multiproc_executor"


class _DropTcmallocHint(logging.Filter):
    """Drops the worker's advice to preload tcmalloc, which is wrong where mimalloc is preloaded."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "libtcmalloc" not in record.getMessage()


def prepare() -> None:
    """Prepare this process. Does nothing the second time that it is called."""
    if allocator.is_preloaded(os.environ.get("LD_PRELOAD", "")):
        _drop_tcmalloc_hint()
    _request_amx_tiles()
    _end_with_parent()
    if envs.VLLM_ARM_BINDING and _EXECUTOR_MODULE in sys.modules:
        from vllm_arm.runtime import worker_processes

        worker_processes.install()


def may_load_a_model() -> bool:
    """Whether this process is EngineCore or a worker, not a front end, which is to start fast."""
    if multiprocessing.parent_process() is not None or RAY_WORKER in os.environ:
        return True
    return os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"


def _drop_tcmalloc_hint() -> None:
    worker_logger = logging.getLogger("vllm.v1.worker.cpu_worker")
    if not any(isinstance(existing, _DropTcmallocHint) for existing in worker_logger.filters):
        worker_logger.addFilter(_DropTcmallocHint())


def _request_amx_tiles() -> None:
    """Ask the kernel for AMX tiles on x86: vLLM's kernels use them before oneDNN has asked, and die by SIGILL."""
    if os.uname().machine != "x86_64":
        return
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def _end_with_parent() -> None:
    """Shut EngineCore down when its server is killed: vLLM leaves it running, with all its memory."""
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == _WATCHER for thread in threading.enumerate()):
        return

    def watch() -> None:
        parent.join()
        logger.error("the parent process %d is gone: shutting down", parent.pid)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_SECONDS_TO_SHUT_DOWN)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name=_WATCHER, daemon=True).start()
