# SPDX-License-Identifier: Apache-2.0
"""Core-to-core latency: how long a cache line takes between any two CPUs of this machine."""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_arm import _host
from vllm_arm.runtime.topology import Topology

ROUND_TRIPS = 1000
REPEATS = 5

Measure = Callable[[int, int], float]


def one_cpu_per_core(topology: Topology) -> list[int]:
    """The first hardware thread that may be used of each core, by NUMA node."""
    first: dict[int, tuple[int, int]] = {}
    for cpu in topology.cpus:
        if cpu.id in topology.allowed:
            first.setdefault(cpu.core, (cpu.node, cpu.id))
    return [cpu for _, cpu in sorted(first.values())]


def measure_pair(first: int, second: int) -> float:
    """Nanoseconds one way between two CPUs. Raises ``RuntimeError`` where one of them cannot be had."""
    return _host.core_latency_ns(first, second, ROUND_TRIPS, REPEATS)


def measure(
    cpus: Sequence[int], pair: Measure = measure_pair, progress: Callable[[int, int], None] = lambda done, of: None
) -> list[list[float | None]]:
    """Nanoseconds one way between every two of ``cpus``, symmetric, in their order; None on the diagonal.

    ``progress`` is told how many pairs are done, and of how many. Raises as ``pair`` does.
    """
    matrix: list[list[float | None]] = [[None] * len(cpus) for _ in cpus]
    pairs = [(row, column) for row in range(len(cpus)) for column in range(row)]
    for done, (row, column) in enumerate(pairs, 1):
        matrix[row][column] = matrix[column][row] = pair(cpus[row], cpus[column])
        progress(done, len(pairs))
    return matrix


class Distance(NamedTuple):
    """The latencies between the cores of two NUMA nodes, or within one, in nanoseconds."""

    nodes: tuple[int, int]
    least: float
    median: float
    most: float


def summarise(topology: Topology, cpus: Sequence[int], matrix: Sequence[Sequence[float | None]]) -> list[Distance]:
    """What ``measure`` gave for ``cpus``, by pairs of NUMA nodes; pairs without a measurement are left out."""
    node_of = {cpu.id: cpu.node for cpu in topology.cpus}
    found: dict[tuple[int, int], list[float]] = {}
    for row, first in enumerate(cpus):
        for column, second in enumerate(cpus[:row]):
            value = matrix[row][column]
            if value is not None:
                nodes = sorted((node_of[first], node_of[second]))
                found.setdefault((nodes[0], nodes[1]), []).append(value)
    return [
        Distance(nodes, min(values), statistics.median(values), max(values)) for nodes, values in sorted(found.items())
    ]
