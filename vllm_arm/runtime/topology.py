# SPDX-License-Identifier: Apache-2.0
"""CPUs, cores, packages and NUMA nodes of this machine, and which of them the process may use.

Everything is read from files under one root directory: sysfs, procfs and the cgroup mounts.
What is missing or malformed is replaced by the plainest assumption and recorded in
`Topology.notes`, which callers announce.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from vllm_arm.runtime.cgroup import (
    CgroupLimits,
    format_cpu_list,
    parse_cpu_list,
    read_limits,
    read_text,
)

__all__ = [
    "LogicalCpu",
    "NumaNode",
    "Topology",
    "format_cpu_list",
    "parse_cpu_list",
    "read_topology",
]

UNKNOWN_PACKAGE = -1
LOCAL_DISTANCE = 10
REMOTE_DISTANCE = 20

_CPU_DIRECTORY = "sys/devices/system/cpu"
_NODE_DIRECTORY = "sys/devices/system/node"


@dataclass(frozen=True, slots=True)
class LogicalCpu:
    """One online hardware thread.

    `core` is the lowest id among the hardware threads of its core, hence unique in the whole
    machine. `package` is the socket, UNKNOWN_PACKAGE where firmware does not tell.
    """

    id: int
    core: int
    package: int
    node: int


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One online NUMA node.

    `cpus` are its online CPUs, empty for memory-only nodes (GPU memory, CXL). `memory_bytes` is
    None where it is unknown and 0 for a node without memory. `distances` follows the order of
    `Topology.nodes`, in the firmware's unit (10 is local), and is empty where it is unknown.
    """

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int | None
    distances: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """The machine as this process sees it.

    `cpus` and `nodes` are online, ascending by id. `offline` are CPUs that exist but are off.
    `allowed` are the online CPUs inside both the affinity mask and the cpuset;
    `allowed_memory_nodes` the nodes whose memory the cpuset permits. `notes` are the fallbacks
    taken while reading.
    """

    cpus: tuple[LogicalCpu, ...]
    nodes: tuple[NumaNode, ...]
    allowed: frozenset[int]
    allowed_memory_nodes: frozenset[int]
    offline: frozenset[int] = frozenset()
    limits: CgroupLimits = field(default_factory=CgroupLimits)
    notes: tuple[str, ...] = ()

    def distance(self, source: int, target: int) -> int:
        """Distance between two node ids; 10 to itself and 20 to others where it is unknown."""
        order = [node.id for node in self.nodes]
        distances = self.nodes[order.index(source)].distances
        if distances:
            return distances[order.index(target)]
        return LOCAL_DISTANCE if source == target else REMOTE_DISTANCE

    def has_usable_memory(self, node: NumaNode) -> bool:
        """Whether this process may allocate on the node (an unknown size counts as some)."""
        return node.id in self.allowed_memory_nodes and node.memory_bytes != 0


def read_topology(root: Path = Path("/"), affinity: frozenset[int] | None = None) -> Topology:
    """Read the topology below `root`, for a process with the given affinity mask.

    `affinity` defaults to this process's own. Never fails on missing or malformed files: see
    `Topology.notes`.
    """
    if affinity is None:
        affinity = frozenset(os.sched_getaffinity(0))
    return _TopologyReader(root).read(affinity)


class _TopologyReader:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._notes: list[str] = []

    def read(self, affinity: frozenset[int]) -> Topology:
        limits = read_limits(self._root)
        for note in limits.notes:
            self._note(note)
        online, offline = self._online_cpus(affinity)
        packages = {cpu: self._package(cpu) for cpu in online}
        cores = self._cores(online, packages)
        nodes = self._nodes(online)
        node_of = self._node_of(nodes, online, packages)
        cpus = tuple(LogicalCpu(cpu, cores[cpu], packages[cpu], node_of[cpu]) for cpu in online)
        nodes = tuple(
            NumaNode(
                node.id,
                tuple(cpu for cpu in online if node_of[cpu] == node.id),
                node.memory_bytes,
                node.distances,
            )
            for node in nodes
        )
        return Topology(
            cpus=cpus,
            nodes=nodes,
            allowed=self._allowed(frozenset(online), affinity, limits),
            allowed_memory_nodes=self._allowed_memory_nodes(nodes, limits),
            offline=offline,
            limits=limits,
            notes=tuple(self._notes),
        )

    def _note(self, message: str) -> None:
        self._notes.append(message)

    def _malformed(self, path: str, text: str, expected: str, fallback: str) -> None:
        self._note(f"/{path} holds {text[:40]!r} instead of {expected}: {fallback}")

    def _list(self, path: str, fallback: str) -> tuple[int, ...] | None:
        """Content of a list file, None (noted where malformed) if there is nothing to use."""
        text = read_text(self._root / path)
        if text is None:
            return None
        try:
            return parse_cpu_list(text)
        except ValueError:
            self._malformed(path, text, "a list such as 0-3,8", fallback)
            return None

    def _integer(self, path: str, fallback: str) -> int | None:
        text = read_text(self._root / path)
        if text is None:
            return None
        if re.fullmatch(r"-?[0-9]{1,18}", text) is None:
            self._malformed(path, text, "a number", fallback)
            return None
        return int(text)

    def _numbered(self, directory: str, prefix: str) -> tuple[int, ...]:
        """Ids of the entries `prefix`N of a directory."""
        try:
            names = os.listdir(self._root / directory)
        except OSError:
            return ()
        matches = (re.fullmatch(rf"{prefix}([0-9]{{1,5}})", name) for name in names)
        return tuple(sorted(int(match[1]) for match in matches if match))

    def _online_cpus(self, affinity: frozenset[int]) -> tuple[tuple[int, ...], frozenset[int]]:
        directories = self._numbered(_CPU_DIRECTORY, "cpu")
        known = self._list(f"{_CPU_DIRECTORY}/present", "CPU directories used") or directories
        online = self._list(f"{_CPU_DIRECTORY}/online", "CPU directories used")
        if not online:
            online = tuple(
                cpu for cpu in directories if read_text(self._root / f"{_CPU_DIRECTORY}/cpu{cpu}/online") != "0"
            )
        if not online:
            self._note(
                f"/{_CPU_DIRECTORY} lists no CPU: the {len(affinity)} CPUs of the affinity mask "
                "are taken, each as a core of its own"
            )
            return tuple(sorted(affinity)), frozenset()
        return online, frozenset(known).difference(online)

    def _package(self, cpu: int) -> int:
        path = f"{_CPU_DIRECTORY}/cpu{cpu}/topology/physical_package_id"
        package = self._integer(path, "package unknown")
        return UNKNOWN_PACKAGE if package is None else package

    def _cores(self, online: tuple[int, ...], packages: dict[int, int]) -> dict[int, int]:
        """Map each CPU to the lowest CPU of its core."""
        cores: dict[int, int] = {}
        by_core_id: dict[tuple[int, int], int] = {}
        unknown: list[int] = []
        for cpu in online:
            directory = f"{_CPU_DIRECTORY}/cpu{cpu}/topology"
            siblings = self._list(f"{directory}/thread_siblings_list", "core_id used")
            if siblings and cpu in siblings:
                cores[cpu] = min(siblings)
                continue
            core_id = self._integer(f"{directory}/core_id", "taken as a core of its own")
            if core_id is None or core_id < 0:
                unknown.append(cpu)
                cores[cpu] = cpu
                continue
            cores[cpu] = by_core_id.setdefault((packages[cpu], core_id), cpu)
        if unknown:
            self._note(f"no core topology for CPUs {format_cpu_list(unknown)}: each is taken as a core of its own")
        return cores

    def _nodes(self, online: tuple[int, ...]) -> tuple[NumaNode, ...]:
        """NUMA nodes as sysfs lists them; their CPUs may be incomplete."""
        directories = self._numbered(_NODE_DIRECTORY, "node")
        listed = self._list(f"{_NODE_DIRECTORY}/online", "node directories used")
        ids = tuple(node for node in listed or directories if node in directories)
        if not ids:
            self._note(f"/{_NODE_DIRECTORY} lists no NUMA node: one node 0 with every CPU is assumed")
            return (NumaNode(0, online, self._memory("proc/meminfo"), (LOCAL_DISTANCE,)),)
        return tuple(
            NumaNode(
                node,
                self._list(f"{_NODE_DIRECTORY}/node{node}/cpulist", "its CPUs are unknown") or (),
                self._memory(f"{_NODE_DIRECTORY}/node{node}/meminfo"),
                self._distances(node, len(ids)),
            )
            for node in ids
        )

    def _memory(self, path: str) -> int | None:
        text = read_text(self._root / path)
        if text is None:
            self._note(f"/{path} cannot be read: the size of its memory is unknown")
            return None
        match = re.search(r"MemTotal:\s*([0-9]+) kB", text)
        if match is None:
            self._malformed(path, text, "a line MemTotal: N kB", "the size is unknown")
            return None
        return int(match[1]) * 1024

    def _distances(self, node: int, count: int) -> tuple[int, ...]:
        path = f"{_NODE_DIRECTORY}/node{node}/distance"
        text = read_text(self._root / path)
        if text is None:
            return ()
        values = text.split()
        if len(values) != count or not all(re.fullmatch(r"[0-9]{1,3}", value) for value in values):
            self._malformed(path, text, f"{count} distances", "10 and 20 assumed")
            return ()
        return tuple(int(value) for value in values)

    def _node_of(
        self, nodes: tuple[NumaNode, ...], online: tuple[int, ...], packages: dict[int, int]
    ) -> dict[int, int]:
        """Map each online CPU to a node, those that no node claims to their package's node."""
        present = frozenset(online)
        node_of: dict[int, int] = {}
        for node in nodes:
            for cpu in present.intersection(node.cpus):
                node_of.setdefault(cpu, node.id)
        orphans = [cpu for cpu in online if cpu not in node_of]
        if not orphans:
            return node_of
        node_of_package: dict[int, int] = {}
        for cpu in sorted(node_of):
            node_of_package.setdefault(packages[cpu], node_of[cpu])
        default = min(node_of.values(), default=nodes[0].id)
        for cpu in orphans:
            node_of[cpu] = node_of_package.get(packages[cpu], default)
        homes = format_cpu_list(node_of[cpu] for cpu in orphans)
        self._note(f"no NUMA node lists CPUs {format_cpu_list(orphans)}: put on node {homes}")
        return node_of

    def _allowed(self, online: frozenset[int], affinity: frozenset[int], limits: CgroupLimits) -> frozenset[int]:
        allowed = online & affinity
        if not allowed:
            self._note(
                f"the affinity mask {format_cpu_list(affinity)} holds no online CPU "
                f"({format_cpu_list(online)}): ignored"
            )
            allowed = online
        if limits.cpuset is not None:
            if allowed & limits.cpuset:
                allowed &= limits.cpuset
            else:
                self._note(
                    f"the cpuset {format_cpu_list(limits.cpuset)} holds none of the CPUs "
                    f"{format_cpu_list(allowed)}: ignored"
                )
        return allowed

    def _allowed_memory_nodes(self, nodes: Iterable[NumaNode], limits: CgroupLimits) -> frozenset[int]:
        ids = frozenset(node.id for node in nodes)
        masks = [limits.memory_nodes]
        status = read_text(self._root / "proc/self/status") or ""
        match = re.search(r"^Mems_allowed_list:(.*)$", status, re.MULTILINE)
        if match is not None:
            try:
                masks.append(frozenset(parse_cpu_list(match[1])))
            except ValueError:
                self._malformed("proc/self/status", match[0], "a list of memory nodes", "ignored")
        for mask in masks:
            if mask is None:
                continue
            if ids & mask:
                ids &= mask
            else:
                self._note(
                    f"the memory nodes {format_cpu_list(mask)} of the cpuset are none of "
                    f"{format_cpu_list(ids)}: ignored"
                )
        return ids
