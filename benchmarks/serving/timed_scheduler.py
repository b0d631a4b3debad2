# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, with a note of when it works: imported in EngineCore while a workload is profiled."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

INTERVALS_VARIABLE = "BENCHMARK_SCHEDULER_INTERVALS"
"""Names the file that takes a line with begin and end of each call, in nanoseconds since the epoch."""

_TIMED = ("schedule", "update_from_output")


def make_scheduler(**options: Any) -> Any:
    """The scheduler that vLLM would make of these ``options``, timed: what ``--scheduler-cls`` takes for a class."""
    config = options["vllm_config"].scheduler_config
    config.scheduler_cls = None
    scheduler = config.get_scheduler_cls()(**options)
    # Open for as long as the process lives, and written line by line, for vLLM may kill it at the end.
    output = open(os.environ[INTERVALS_VARIABLE], "a", buffering=1, encoding="utf-8")  # noqa: SIM115
    for name in _TIMED:
        setattr(scheduler, name, _timed(getattr(scheduler, name), output.write))
    return scheduler


def _timed(function: Callable[..., Any], write: Callable[[str], Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        started = time.time_ns()
        try:
            return function(*arguments, **options)
        finally:
            write(f"{started} {time.time_ns()}\n")

    return call


def read_intervals(path: Path) -> list[tuple[int, int]]:
    """The intervals that :func:`make_scheduler` noted in ``path``; none where it is missing."""
    if not path.exists():
        return []
    pairs = (line.split() for line in path.read_text().splitlines())
    return [(int(pair[0]), int(pair[1])) for pair in pairs if len(pair) == 2]
