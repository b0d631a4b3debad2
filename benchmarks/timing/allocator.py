# SPDX-License-Identifier: Apache-2.0
"""The allocator's case: an MLP under glibc's malloc and under mimalloc, in fresh processes that take turns."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.timing import mlp
from vllm_arm.runtime import allocator, preload

OP = "allocator"
CASE = f"mlp_{mlp.TOKENS}x{mlp.HIDDEN}x{mlp.INTERMEDIATE}"
THREADS = 2
PASSES = 60
ALLOCATORS = ("glibc", "mimalloc")


class AllocatorError(Exception):
    """The case cannot be run; the message is one line for a user."""


@dataclass(frozen=True)
class Comparison:
    """The processes of each allocator, in the order in which they ran; seconds and faults are those of one pass."""

    processes: dict[str, list[dict[str, Any]]]

    def fastest(self, name: str) -> float:
        """The fastest pass of all processes: the one that nothing else on the machine disturbed."""
        return float(min(min(process["seconds"]) for process in self.processes[name]))

    def median(self, name: str) -> float:
        """The median of the processes' medians."""
        return float(median(median(process["seconds"]) for process in self.processes[name]))

    def page_faults(self, name: str) -> float:
        """Of one pass, the median of the processes."""
        return float(median(process["page_faults"] for process in self.processes[name]))

    def system_seconds(self, name: str) -> float:
        """Of one pass, over all threads, the median of the processes."""
        return float(median(process["system_seconds"] for process in self.processes[name]))

    def cpu_seconds(self, name: str) -> float:
        """Of one pass, over all threads, the median of the processes."""
        return float(median(_cpu_seconds(process) for process in self.processes[name]))

    def speed_up(self) -> float:
        """Of mimalloc over glibc in CPU seconds, which other work on the machine hardly changes.

        The median over the pairs of processes. Threads that wait sleep, so that waiting takes none.
        """
        return self._median_ratio(_cpu_seconds)

    def wall_speed_up(self) -> float:
        """The same in the median time of a pass, which is fair only where nothing else runs."""
        return self._median_ratio(lambda process: median(process["seconds"]))

    def _median_ratio(self, measure: Callable[[dict[str, Any]], float]) -> float:
        pairs = zip(self.processes["glibc"], self.processes["mimalloc"], strict=True)
        return float(median(measure(glibc) / measure(mimalloc) for glibc, mimalloc in pairs))


def _cpu_seconds(process: dict[str, Any]) -> float:
    return float(process["user_seconds"] + process["system_seconds"])


def environment(name: str) -> dict[str, str]:
    """The environment of a process under the allocator ``name``.

    Raises ``AllocatorError`` where mimalloc is not installed, or where another allocator is preloaded already.
    """
    loaded = os.environ.get("LD_PRELOAD", "")
    existing = preload.find(loaded, allocator.ALLOCATORS)
    if existing is not None:
        raise AllocatorError(f"LD_PRELOAD already names an allocator, {existing}")
    base = {**os.environ, "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    if name == "glibc":
        return base
    library = allocator.find_mimalloc()
    if library is None:
        raise AllocatorError(f"mimalloc is not installed (pip install {allocator.DISTRIBUTION})")
    return {**allocator.TUNING, **base, "LD_PRELOAD": preload.prepend(loaded, [library])}


def compare(
    pairs: int, threads: int = THREADS, passes: int = PASSES, finished: Callable[[], None] = lambda: None
) -> Comparison:
    """Run ``pairs`` processes under each allocator, in turns. ``finished`` is told after each."""
    environments = {name: environment(name) for name in ALLOCATORS}
    processes: dict[str, list[dict[str, Any]]] = {name: [] for name in ALLOCATORS}
    for number in range(pairs):
        for name in ALLOCATORS if number % 2 == 0 else ALLOCATORS[::-1]:
            processes[name].append(_run(environments[name], threads, passes))
            finished()
    return Comparison(processes)


def _run(process_environment: dict[str, str], threads: int, passes: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-P", mlp.__file__, str(threads), str(passes)],
        env=process_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise AllocatorError(f"{mlp.__file__} ended with {done.returncode}: {said[-1] if said else 'no output'}")
    return dict(json.loads(done.stdout))
