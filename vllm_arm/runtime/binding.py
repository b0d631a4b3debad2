# SPDX-License-Identifier: Apache-2.0
"""Which CPUs each worker's OpenMP threads are bound to.

The policy, for ranks that all work in step so that the slowest costs everybody:

* a rank stays inside one package, on NUMA nodes of its own if there are enough, because each
  node brings memory bandwidth; several ranks share a node only when nodes are short, or when
  keeping them apart would leave less than half the threads;
* every rank gets the same number of CPUs, one hardware thread per core;
* EngineCore and the API server get the remainder, and CPUs from the end of each rank's list;
* a value of VLLM_CPU_OMP_THREADS_BIND given by the user wins over all of this.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass

from vllm_arm.runtime.cgroup import format_cpu_list, parse_cpu_list
from vllm_arm.runtime.topology import UNKNOWN_PACKAGE, LogicalCpu, Topology

BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
AUTO = "auto"
NOBIND = "nobind"

_EXPECTED = "expected 'auto', 'nobind' or one CPU list per rank such as '0-31|32-63'"
_ENGINE_CPUS_PER_REPLICA = 2
"""EngineCore and the API server; what they need does not grow with the number of ranks."""


class BindingError(ValueError):
    """The threads cannot be bound as asked; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class RankBinding:
    """Where one worker runs.

    `rank` counts through [DP, PP, TP] in that order. `cpus` are ascending ids, one OpenMP thread
    each; `nodes` the NUMA nodes they lie on; `memory_nodes` those to allocate from.
    """

    rank: int
    cpus: tuple[int, ...]
    nodes: tuple[int, ...]
    memory_nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BindingPlan:
    """Where every worker runs.

    `ranks` is empty if threads are not bound. `engine_cpus` are left to EngineCore and the API
    server; empty means that these share the workers' CPUs. `reasons` explains the choice and
    `warnings` what is likely to be slow.
    """

    ranks: tuple[RankBinding, ...]
    engine_cpus: tuple[int, ...]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def as_vllm_environment(self) -> str:
        """The value of VLLM_CPU_OMP_THREADS_BIND, such as "0-31|32-63" or "nobind"."""
        return "|".join(format_cpu_list(rank.cpus) for rank in self.ranks) or NOBIND

    def to_json(self) -> str:
        """The plan as text, for a child process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BindingPlan:
        """The plan that ``to_json`` wrote."""
        fields = json.loads(text)
        ranks = tuple(
            RankBinding(rank["rank"], tuple(rank["cpus"]), tuple(rank["nodes"]), tuple(rank["memory_nodes"]))
            for rank in fields["ranks"]
        )
        return cls(ranks, tuple(fields["engine_cpus"]), tuple(fields["reasons"]), tuple(fields["warnings"]))

    def sharers(self, rank: int) -> int:
        """How many ranks take memory from a NUMA node of ``rank``, itself included."""
        nodes = set(self.ranks[rank].memory_nodes)
        return sum(1 for other in self.ranks if nodes.intersection(other.memory_nodes)) or 1


def plan_binding(
    topology: Topology,
    ranks: int,
    *,
    replicas: int = 1,
    reserved_cpus: int | None = None,
    explicit: str | None = None,
    span_nodes: bool = False,
    visible_nodes: Collection[int] | None = None,
) -> BindingPlan:
    """Choose the CPUs of `ranks` workers (tensor times pipeline parallel) per replica.

    `replicas` is the number of data-parallel replicas on this machine, each with its own
    EngineCore; `reserved_cpus` the CPUs left free per replica (by default one per rank, at most
    two). `explicit` is the user's VLLM_CPU_OMP_THREADS_BIND. `span_nodes` lets a rank cross
    packages. `visible_nodes` restricts the choice to the CPUs of these NUMA nodes.

    Raises BindingError for impossible or malformed requests.
    """
    for name, value, least in (("ranks", ranks, 1), ("replicas", replicas, 1)):
        if value < least:
            raise BindingError(f"{name}={value}: expected a number of at least {least}")
    if explicit is not None:
        explicit = explicit.strip()
    if explicit == NOBIND:
        return BindingPlan((), (), (f"{BIND_VARIABLE}={NOBIND}: threads are not bound",))
    if explicit is not None and explicit != AUTO:
        return _explicit_plan(topology, explicit, ranks, replicas)
    if reserved_cpus is None:
        reserved_cpus = min(ranks, _ENGINE_CPUS_PER_REPLICA)
    elif reserved_cpus < 0:
        raise BindingError(f"VLLM_CPU_NUM_OF_RESERVED_CPU={reserved_cpus}: expected a number of CPUs, 0 or more")
    planner = _Planner(topology, ranks * replicas, span_nodes, visible_nodes)
    return planner.plan(reserved_cpus * replicas)


def _rank_binding(topology: Topology, rank: int, cpus: Iterable[int]) -> RankBinding:
    chosen = tuple(sorted(set(cpus)))
    node_of = {cpu.id: cpu.node for cpu in topology.cpus}
    nodes = tuple(sorted({node_of[cpu] for cpu in chosen}))
    usable = [node for node in topology.nodes if topology.has_usable_memory(node)]
    memory_nodes: set[int] = set()
    for node in nodes:
        nearest = min(
            usable,
            # Among equally near ones, memory next to CPUs rather than a GPU's or CXL memory.
            key=lambda other: (
                other.id != node,
                topology.distance(node, other.id),
                not other.cpus,
                other.id,
            ),
            default=None,
        )
        if nearest is not None:
            memory_nodes.add(nearest.id)
    return RankBinding(rank, chosen, nodes, tuple(sorted(memory_nodes)))


def _explicit_plan(topology: Topology, value: str, ranks: int, replicas: int) -> BindingPlan:
    prefix = f"{BIND_VARIABLE}={value!r}"
    entries = value.split("|")
    if len(entries) != ranks * replicas:
        expected = f"{ranks} (one per local rank)"
        if replicas > 1:
            expected = f"{ranks * replicas} ({replicas} replicas of {ranks} ranks)"
        raise BindingError(f"{prefix} has {len(entries)} CPU lists, expected {expected}")
    bindings = tuple(
        _rank_binding(topology, rank, _explicit_entry(topology, f"{prefix}: rank {rank}", entry))
        for rank, entry in enumerate(entries)
    )
    bound = Counter(cpu for binding in bindings for cpu in binding.cpus)
    warnings: list[str] = []
    shared = [cpu for cpu, count in bound.items() if count > 1]
    if shared:
        warnings.append(f"{prefix}: CPUs {format_cpu_list(shared)} are given to several ranks")
    sizes = sorted({len(binding.cpus) for binding in bindings})
    if len(sizes) > 1:
        warnings.append(f"{prefix}: ranks have {sizes[0]} to {sizes[-1]} CPUs; all wait for the smallest")
    quota = topology.limits.cpu_quota
    if quota is not None and quota < len(bound):
        warnings.append(f"{prefix}: {len(bound)} CPUs are bound under a quota of {quota:g} CPUs")
    engine = tuple(sorted(topology.allowed.difference(bound)))
    return BindingPlan(bindings, engine, (f"{prefix} is used as given",), tuple(warnings))


def _explicit_entry(topology: Topology, prefix: str, entry: str) -> tuple[int, ...]:
    try:
        cpus = parse_cpu_list(entry)
    except ValueError as error:
        raise BindingError(f"{prefix}: {error}; {_EXPECTED}") from None
    if not cpus:
        raise BindingError(f"{prefix} has an empty CPU list; {_EXPECTED}")
    online = frozenset(cpu.id for cpu in topology.cpus)
    problems = (
        ("do not exist", frozenset(cpus) - online - topology.offline, online),
        ("are offline", topology.offline.intersection(cpus), online),
        ("are not allowed to this process", online.intersection(cpus) - topology.allowed, None),
    )
    for problem, wrong, expected in problems:
        if wrong:
            fitting = format_cpu_list(topology.allowed if expected is None else expected)
            kind = "allowed" if expected is None else "online"
            raise BindingError(f"{prefix}: CPUs {format_cpu_list(wrong)} {problem}; {kind} are {fitting}")
    return cpus


@dataclass(frozen=True, slots=True)
class _Core:
    """One usable core: the hardware thread for OpenMP, and its other allowed threads."""

    cpu: LogicalCpu
    siblings: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Pool:
    """Cores of one node, or of several nodes for one rank, that fit `capacity` ranks."""

    cores: tuple[_Core, ...]
    capacity: int


_Group = dict[int, list[_Core]]
"""Cores per NUMA node, for nodes that belong together: those of one package."""


class _Planner:
    def __init__(
        self,
        topology: Topology,
        workers: int,
        span_nodes: bool,
        visible_nodes: Collection[int] | None,
    ) -> None:
        self._topology = topology
        self._workers = workers
        self._reasons: list[str] = []
        self._warnings: list[str] = []
        self._with_memory = frozenset(node.id for node in topology.nodes if topology.has_usable_memory(node))
        cpus = self._visible_cpus(visible_nodes)
        self._groups = self._group(self._choose_cores(cpus), span_nodes)

    def plan(self, reserved: int) -> BindingPlan:
        pools, threads = self._choose_pools()
        counts = self._spread(pools)
        used = [group for group in self._groups if any(_overlap(group, pool) for pool in pools)]
        available = [core for group in used for cores in group.values() for core in cores]
        total, threads = self._apply_quota(len(available), threads)
        size = threads - self._reserve(reserved, total - threads * self._workers, threads)

        bindings: list[RankBinding] = []
        trimmed: list[_Core] = []
        for pool, count in zip(pools, counts, strict=True):
            for index in range(count):
                cores = pool.cores[index * threads : (index + 1) * threads]
                trimmed += cores[size:]
                cpus = (core.cpu.id for core in cores[:size])
                bindings.append(_rank_binding(self._topology, len(bindings), cpus))
        bound = {cpu for binding in bindings for cpu in binding.cpus}
        # The cores nearest to the ranks first; a quota may leave the engine only some of them.
        candidates = [*trimmed, *(core for pool in pools for core in pool.cores), *available]
        free = {core.cpu.id: core for core in candidates if core.cpu.id not in bound}
        engine = list(free.values())[: max(0, total - size * self._workers)]
        self._explain(bindings, used, engine)
        return BindingPlan(
            tuple(bindings),
            self._engine_cpus(engine, available),
            tuple(self._reasons),
            tuple(self._warnings),
        )

    def _visible_cpus(self, visible_nodes: Collection[int] | None) -> list[LogicalCpu]:
        cpus = [cpu for cpu in self._topology.cpus if cpu.id in self._topology.allowed]
        if visible_nodes is None:
            return cpus
        prefix = f"CPU_VISIBLE_MEMORY_NODES={','.join(map(str, visible_nodes))}"
        known = {node.id for node in self._topology.nodes}
        unknown = sorted(set(visible_nodes) - known)
        if unknown:
            raise BindingError(
                f"{prefix}: NUMA nodes {', '.join(map(str, unknown))} do not exist; online are {format_cpu_list(known)}"
            )
        cpus = [cpu for cpu in cpus if cpu.node in visible_nodes]
        if not cpus:
            raise BindingError(f"{prefix}: these NUMA nodes have no CPU that may be used")
        self._reasons.append(f"{prefix}: only CPUs of these NUMA nodes are used")
        return cpus

    def _choose_cores(self, cpus: Sequence[LogicalCpu]) -> list[_Core]:
        if self._workers > len(cpus):
            raise BindingError(
                f"{self._workers} ranks need at least one CPU each, but only {len(cpus)} "
                f"may be used ({format_cpu_list(cpu.id for cpu in cpus)}): lower "
                "--tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size"
            )
        threads: dict[int, list[LogicalCpu]] = {}
        for cpu in cpus:
            threads.setdefault(cpu.core, []).append(cpu)
        if len(threads) == len(cpus):
            return [_Core(cpu, ()) for cpu in cpus]
        if self._workers > len(threads):
            self._warnings.append(f"{self._workers} ranks on {len(threads)} cores: ranks share cores")
            return [_Core(cpu, ()) for cpu in cpus]
        self._reasons.append(f"one hardware thread on each of {len(threads)} cores ({len(cpus)} CPUs)")
        return [_Core(first, tuple(sibling.id for sibling in rest)) for first, *rest in threads.values()]

    def _group(self, cores: Iterable[_Core], span_nodes: bool) -> list[_Group]:
        """Put nodes that share a package together; all of them if ranks may cross packages."""
        nodes: _Group = {}
        for core in sorted(cores, key=lambda core: (core.cpu.node, core.cpu.package, core.cpu.id)):
            nodes.setdefault(core.cpu.node, []).append(core)
        groups: list[tuple[set[int], _Group]] = []
        for node, members in nodes.items():
            packages = {core.cpu.package for core in members} - {UNKNOWN_PACKAGE}
            together = [group for group in groups if span_nodes or packages & group[0]]
            merged: _Group = {}
            for group in together:
                packages |= group[0]
                merged |= group[1]
                groups.remove(group)
            groups.append((packages, merged | {node: members}))
        return [group for _, group in sorted(groups, key=lambda group: min(group[1]))]

    def _choose_pools(self) -> tuple[list[_Pool], int]:
        """The places for ranks, and the largest number of threads that fits each rank."""
        apart, shared = self._most_threads(False), self._most_threads(True)
        # A node's bandwidth is halved for two ranks on it: worth it for twice the threads only.
        share = shared > 2 * apart
        threads = shared if share else apart
        pools = [pool for group in self._groups for pool in _pools(group, threads, share)]
        if share:
            cause = "there are fewer NUMA nodes" if apart == 0 else "the nodes' sizes differ a lot"
            self._reasons.append(f"ranks share NUMA nodes: {cause}")
        if len(pools) > self._workers:
            best = sorted(
                pools,
                key=lambda pool: (not self._has_memory(pool), -len(pool.cores)),
            )[: self._workers]
            pools = [pool for pool in pools if pool in best]
        return pools, threads

    def _most_threads(self, share: bool) -> int:
        largest = max(sum(map(len, group.values())) for group in self._groups)
        for threads in range(largest, 0, -1):
            pools = (pool for group in self._groups for pool in _pools(group, threads, share))
            if sum(pool.capacity for pool in pools) >= self._workers:
                return threads
        return 0

    def _has_memory(self, pool: _Pool) -> bool:
        return all(core.cpu.node in self._with_memory for core in pool.cores)

    def _spread(self, pools: Sequence[_Pool]) -> list[int]:
        """How many ranks each pool gets, as even as capacities permit."""
        counts = [0] * len(pools)
        for _ in range(self._workers):
            open_pools = [i for i, pool in enumerate(pools) if counts[i] < pool.capacity]
            counts[min(open_pools, key=lambda i: counts[i])] += 1
        return counts

    def _apply_quota(self, total: int, threads: int) -> tuple[int, int]:
        """CPUs to use in all, and threads per rank, under the cgroup's CPU quota."""
        quota = self._topology.limits.cpu_quota
        if quota is None or quota >= total:
            return total, threads
        whole = max(1, math.floor(quota))
        self._reasons.append(f"the cgroup's CPU quota of {quota:g} CPUs limits the {total} CPUs")
        if whole < self._workers:
            self._warnings.append(f"{self._workers} ranks under a CPU quota of {quota:g} CPUs will be throttled")
        return whole, min(threads, max(1, whole // self._workers))

    def _reserve(self, reserved: int, remainder: int, threads: int) -> int:
        """Threads that each rank gives up so that `reserved` CPUs are free in all."""
        wanted = math.ceil(max(0, reserved - max(0, remainder)) / self._workers)
        if wanted >= threads:
            self._reasons.append(f"too few CPUs to leave {reserved} free: every rank keeps at least one")
        return min(wanted, threads - 1)

    def _engine_cpus(self, engine: Sequence[_Core], available: Sequence[_Core]) -> tuple[int, ...]:
        if self._topology.limits.cpu_quota is not None:
            return tuple(sorted(core.cpu.id for core in engine))
        cpus = [cpu for core in engine for cpu in (core.cpu.id, *core.siblings)]
        if not cpus:
            # Better the second thread of a busy core than the one a worker spins on.
            cpus = [sibling for core in available for sibling in core.siblings]
        return tuple(sorted(cpus))

    def _explain(self, bindings: Sequence[RankBinding], used: Sequence[_Group], engine: Sequence[_Core]) -> None:
        size = len(bindings[0].cpus)
        self._reasons.append(f"CPUs per rank: {size}; left to EngineCore and the API server: {len(engine)}")
        for binding in bindings:
            if len(binding.nodes) > 1:
                self._reasons.append(f"rank {binding.rank} spans NUMA nodes {format_cpu_list(binding.nodes)}")
            remote = [node for node in binding.nodes if node not in binding.memory_nodes]
            if remote and binding.memory_nodes:
                self._reasons.append(
                    f"rank {binding.rank}: NUMA node {format_cpu_list(remote)} has no memory to "
                    f"use, node {format_cpu_list(binding.memory_nodes)} is used"
                )
        for group in self._groups:
            if group not in used:
                self._reasons.append(self._explain_idle(group))

    def _explain_idle(self, group: _Group) -> str:
        cores = [core for members in group.values() for core in members]
        packages = {core.cpu.package for core in cores} - {UNKNOWN_PACKAGE}
        place = f"NUMA node {format_cpu_list(group)}"
        if packages:
            place = f"package {format_cpu_list(packages)} ({place})"
        message = f"{place} with {len(cores)} cores stays idle"
        if self._workers < len(self._groups):
            message += f": --tensor-parallel-size {len(self._groups)} would use it"
        return message


def _overlap(group: _Group, pool: _Pool) -> bool:
    return pool.cores[0].cpu.node in group


def _pools(group: _Group, threads: int, share: bool) -> list[_Pool]:
    """Cut a group into places for ranks of `threads` cores.

    A node that is large enough fits one rank, or several if they may share it; smaller nodes are
    joined until they are large enough together, largest first so that trimming empties a node.
    """
    pools: list[_Pool] = []
    joined: list[list[_Core]] = []
    for cores in group.values():
        if len(cores) >= threads:
            pools.append(_Pool(tuple(cores), len(cores) // threads if share else 1))
            continue
        joined.append(cores)
        if sum(map(len, joined)) >= threads:
            members = sorted(joined, key=len, reverse=True)
            pools.append(_Pool(tuple(core for node in members for core in node), 1))
            joined = []
    return pools
