# SPDX-License-Identifier: Apache-2.0
"""Puts processes where the binding plan wants them, and tells where their memory really is.

The front end makes the plan and hands it to EngineCore and the workers through the environment.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from vllm_arm.logs import get_logger
from vllm_arm.runtime.binding import BindingPlan, RankBinding
from vllm_arm.runtime.cgroup import format_cpu_list
from vllm_arm.startup import warn_once_in_process_tree

logger = get_logger(__name__)

PLAN_VARIABLE = "_VLLM_ARM_PLAN"
"""Not a setting: the plan of this machine, as JSON."""

_SERVER_PROGRAMS = ("vllm", "api_server.py")


def inherited_plan() -> BindingPlan | None:
    """The plan that a parent process made, None where there is none."""
    text = os.environ.get(PLAN_VARIABLE)
    return BindingPlan.from_json(text) if text else None


def index_of_rank(local_rank: int, local_world_size: int, local_replica: int | None) -> int:
    """Where a plan holds worker ``local_rank`` of the data-parallel replica ``local_replica`` of this machine."""
    return (local_replica or 0) * local_world_size + local_rank


def inherited_rank(index: int) -> tuple[BindingPlan, RankBinding] | None:
    """The inherited plan with its worker ``index``; None where that worker is not bound."""
    plan = inherited_plan()
    if plan is None or index >= len(plan.ranks):
        return None
    return plan, plan.ranks[index]


def is_server() -> bool:
    """Whether this process is an API server of vLLM's own, not a program that uses vLLM as a library."""
    return Path(sys.argv[0] if sys.argv else "").name in _SERVER_PROGRAMS


def bind_process(cpus: Sequence[int], name: str) -> None:
    """Move every thread of this process, ``name`` in the log, to ``cpus``; nothing is done where there are none."""
    if cpus and move_process(cpus, name):
        logger.info("%s: bound to CPUs %s, off the workers' cores", name, format_cpu_list(cpus))


def move_process(cpus: Sequence[int], name: str) -> bool:
    """Move every thread of this process to ``cpus``. Where it cannot be, warn and return False."""
    try:
        for thread in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(thread), cpus)
            except ProcessLookupError:
                continue
    except OSError as error:
        warn_once_in_process_tree(f"{name} is not bound to CPUs {format_cpu_list(cpus)}: {error.strerror}")
        return False
    return True


@contextmanager
def children_on(cpus: Sequence[int]) -> Iterator[None]:
    """Start child processes on ``cpus``: this thread is there meanwhile, and a child inherits that.

    A CPU that is not there or not allowed leaves everything as it is.
    """
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        warn_once_in_process_tree(f"a worker cannot start on CPUs {format_cpu_list(cpus)}: {error.strerror}")
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def memory_share(
    nodes: Sequence[tuple[int, int]], sharers: int, ranks: int, limit: int | None, usage: int | None
) -> tuple[int, int]:
    """The bytes of memory, in all and available, that a worker has on its NUMA nodes.

    ``nodes`` are those two numbers for each of them; ``sharers`` workers take memory there. ``limit`` and ``usage``
    are the control group's, which all ``ranks`` workers share wherever they are.
    """
    total = sum(node[0] for node in nodes) // sharers
    available = sum(node[1] for node in nodes)
    if limit is not None:
        total = min(total, limit // ranks)
        available = min(available, max(0, limit - (usage or 0)))
    return total, available


class MemoryPlacement(NamedTuple):
    """The anonymous memory of a process in bytes: for each NUMA node, in all, and its part on the wanted nodes."""

    by_node: dict[int, int]
    total: int
    wanted: int

    @property
    def share(self) -> float:
        """The part on the wanted nodes, from 0 to 1."""
        return self.wanted / self.total if self.total else 1.0


def parse_numa_maps(text: str, nodes: Sequence[int]) -> MemoryPlacement:
    """Sum up a ``/proc/PID/numa_maps``: anonymous memory only, for that of files is shared with others."""
    by_node: dict[int, int] = {}
    for line in text.splitlines():
        fields = dict(field.split("=", 1) for field in line.split() if "=" in field)
        if "anon" not in fields or "file" in fields:
            continue
        page = int(fields.get("kernelpagesize_kB", "4")) * 1024
        for name, value in fields.items():
            if name.startswith("N") and name[1:].isdigit():
                node = int(name[1:])
                by_node[node] = by_node.get(node, 0) + int(value) * page
    wanted = sum(size for node, size in by_node.items() if node in nodes)
    return MemoryPlacement(by_node, sum(by_node.values()), wanted)


def read_memory_placement(pid: int | None, nodes: Sequence[int], root: Path = Path("/")) -> MemoryPlacement | None:
    """Where the memory of process ``pid`` (None: this one) is; None where the kernel does not tell."""
    try:
        text = (root / f"proc/{pid or 'self'}/numa_maps").read_text()
    except OSError:
        return None
    return parse_numa_maps(text, nodes)
