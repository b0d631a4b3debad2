# SPDX-License-Identifier: Apache-2.0
"""Loggers under vLLM's own root, so that its handlers and levels apply."""

import logging
from functools import cache

_ROOT = "vllm.vllm_arm"


def get_logger(name: str) -> logging.Logger:
    """The logger of module ``name`` (its ``__name__``), a child of vLLM's logger."""
    return logging.getLogger(_ROOT + name.removeprefix("vllm_arm"))


@cache
def warning_once(logger: logging.Logger, message: str) -> None:
    """Log ``message`` as a warning the first time that it is given in this process."""
    logger.warning(message)


@cache
def info_once(logger: logging.Logger, message: str) -> None:
    """Log ``message`` the first time that it is given in this process."""
    logger.info(message)
