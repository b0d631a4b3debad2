# SPDX-License-Identifier: Apache-2.0
"""The binding policy: explicit values, errors, explanations, and what holds on any machine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_arm.runtime.binding import BindingError, BindingPlan, plan_binding
from vllm_arm.runtime.cgroup import CgroupLimits
from vllm_arm.runtime.topology import (
    UNKNOWN_PACKAGE,
    LogicalCpu,
    NumaNode,
    Topology,
    format_cpu_list,
    parse_cpu_list,
)


def machine(*nodes: tuple[int, int], memory: tuple[int | None, ...] = (), threads: int = 1) -> Topology:
    """A machine from (package, number of cores) per NUMA node."""
    cpus: list[LogicalCpu] = []
    cores = sum(count for _, count in nodes)
    core = 0
    for node, (package, count) in enumerate(nodes):
        for _ in range(count):
            cpus += [LogicalCpu(core + cores * i, core, package, node) for i in range(threads)]
            core += 1
    cpus.sort(key=lambda cpu: cpu.id)
    return Topology(
        cpus=tuple(cpus),
        nodes=tuple(
            NumaNode(
                node,
                tuple(cpu.id for cpu in cpus if cpu.node == node),
                memory[node] if memory else 1 << 30,
                (),
            )
            for node in range(len(nodes))
        ),
        allowed=frozenset(cpu.id for cpu in cpus),
        allowed_memory_nodes=frozenset(range(len(nodes))),
    )


TWO_NODES = machine((0, 8), (1, 8))


def text(plan: BindingPlan) -> str:
    return "; ".join(plan.reasons)


def test_explicit_value_wins() -> None:
    plan = plan_binding(TWO_NODES, 2, explicit=" 0,2-3 | 8-10 ", reserved_cpus=4)
    assert plan.as_vllm_environment() == "0,2-3|8-10"
    assert [rank.nodes for rank in plan.ranks] == [(0,), (1,)]
    assert [rank.memory_nodes for rank in plan.ranks] == [(0,), (1,)]
    assert format_cpu_list(plan.engine_cpus) == "1,4-7,11-15"
    assert plan.reasons == ("VLLM_CPU_OMP_THREADS_BIND='0,2-3 | 8-10' is used as given",)
    assert plan.warnings == ()


def test_explicit_value_may_cross_nodes() -> None:
    plan = plan_binding(TWO_NODES, 1, explicit="0-15")
    assert plan.ranks[0].nodes == plan.ranks[0].memory_nodes == (0, 1)


def test_explicit_value_covers_all_replicas() -> None:
    plan = plan_binding(TWO_NODES, 2, replicas=2, explicit="0-1|2-3|8-9|10-11")
    assert [rank.rank for rank in plan.ranks] == [0, 1, 2, 3]
    assert plan.ranks[2].cpus == (8, 9)


def test_nobind_passes_through() -> None:
    plan = plan_binding(TWO_NODES, 100, explicit="nobind")
    assert plan.as_vllm_environment() == "nobind"
    assert (plan.ranks, plan.engine_cpus) == ((), ())


def test_auto_is_the_default() -> None:
    assert plan_binding(TWO_NODES, 2, explicit="auto") == plan_binding(TWO_NODES, 2)


@pytest.mark.parametrize(
    ("value", "ranks", "replicas", "message"),
    [
        ("0-3", 2, 1, "='0-3' has 1 CPU lists, expected 2 (one per local rank)"),
        ("0|1", 2, 2, "='0|1' has 2 CPU lists, expected 4 (2 replicas of 2 ranks)"),
        ("", 1, 1, "='': rank 0 has an empty CPU list; expected 'auto', 'nobind' or one CPU list"),
        ("1-3|", 2, 1, "='1-3|': rank 1 has an empty CPU list; expected 'auto'"),
        ("1-3|x", 2, 1, "='1-3|x': rank 1: 'x' in 'x' is neither a number nor a range a-b; exp"),
        ("Auto", 1, 1, "='Auto': rank 0: 'Auto' in 'Auto' is neither"),
        ("0-17", 1, 1, "='0-17': rank 0: CPUs 16-17 do not exist; online are 1-15"),
        ("0-1", 1, 1, "='0-1': rank 0: CPUs 0 are offline; online are 1-15"),
        ("1-5|6-9", 2, 1, "='1-5|6-9': rank 1: CPUs 9 are not allowed to this process; allowed"),
    ],
)
def test_explicit_errors(value: str, ranks: int, replicas: int, message: str) -> None:
    topology = replace(
        TWO_NODES,
        cpus=TWO_NODES.cpus[1:],
        offline=frozenset({0}),
        allowed=frozenset(range(1, 9)),
    )
    with pytest.raises(BindingError) as error:
        plan_binding(topology, ranks, replicas=replicas, explicit=value)
    assert str(error.value).startswith(f"VLLM_CPU_OMP_THREADS_BIND{message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "quota", "warning"),
    [
        ("0-3|2-5", None, "CPUs 2-3 are given to several ranks"),
        ("0-3|4-5", None, "ranks have 2 to 4 CPUs; all wait for the smallest"),
        ("0-3|4-7", 6.5, "8 CPUs are bound under a quota of 6.5 CPUs"),
    ],
)
def test_explicit_warnings(value: str, quota: float | None, warning: str) -> None:
    topology = replace(TWO_NODES, limits=CgroupLimits(cpu_quota=quota))
    plan = plan_binding(topology, 2, explicit=value)
    assert plan.as_vllm_environment() == value
    assert plan.warnings == (f"VLLM_CPU_OMP_THREADS_BIND={value!r}: {warning}",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks=0: expected a number of at least 1"),
        ({"ranks": 1, "replicas": -1}, "replicas=-1: expected a number of at least 1"),
        (
            {"ranks": 1, "reserved_cpus": -1},
            "VLLM_CPU_NUM_OF_RESERVED_CPU=-1: expected a number of CPUs, 0 or more",
        ),
        (
            {"ranks": 17},
            "17 ranks need at least one CPU each, but only 16 may be used (0-15): lower "
            "--tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size",
        ),
        ({"ranks": 6, "replicas": 3}, "18 ranks need at least one CPU each"),
        (
            {"ranks": 1, "visible_nodes": [1, 4]},
            "CPU_VISIBLE_MEMORY_NODES=1,4: NUMA nodes 4 do not exist; online are 0-1",
        ),
        (
            {"ranks": 1, "visible_nodes": []},
            "CPU_VISIBLE_MEMORY_NODES=: these NUMA nodes have no CPU that may be used",
        ),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BindingError) as error:
        plan_binding(TWO_NODES, **arguments)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("reserved", "ranks", "environment", "engine"),
    [
        (0, 1, "0-7", ""),
        (3, 1, "0-4", "5-7"),
        (0, 2, "0-7|8-15", ""),
        (1, 2, "0-6|8-14", "7,15"),
        (4, 2, "0-5|8-13", "6-7,14-15"),
        (0, 3, "0-3|4-7|8-11", "12-15"),
        (5, 3, "0-2|4-6|8-10", "3,7,11-15"),
        (99, 2, "0|8", "1-7,9-15"),
    ],
)
def test_reserved_cpus(reserved: int, ranks: int, environment: str, engine: str) -> None:
    plan = plan_binding(TWO_NODES, ranks, reserved_cpus=reserved)
    assert plan.as_vllm_environment() == environment
    assert format_cpu_list(plan.engine_cpus) == engine
    assert ("too few CPUs to leave" in text(plan)) == (reserved == 99)


def test_reserved_cpus_are_per_replica() -> None:
    plan = plan_binding(TWO_NODES, 1, replicas=2, reserved_cpus=2)
    assert plan.as_vllm_environment() == "0-5|8-13"


def test_visible_nodes() -> None:
    plan = plan_binding(TWO_NODES, 2, visible_nodes=[1])
    assert plan.as_vllm_environment() == "8-10|12-14"
    assert "CPU_VISIBLE_MEMORY_NODES=1: only CPUs of these NUMA nodes are used" in plan.reasons


def test_idle_package_is_explained() -> None:
    assert plan_binding(TWO_NODES, 1).reasons == (
        "CPUs per rank: 7; left to EngineCore and the API server: 1",
        "package 1 (NUMA node 1) with 8 cores stays idle: --tensor-parallel-size 2 would use it",
    )
    assert "idle" not in text(plan_binding(TWO_NODES, 2))
    assert "idle" not in text(plan_binding(TWO_NODES, 1, span_nodes=True))


def test_nodes_of_unknown_packages_are_kept_apart() -> None:
    topology = machine((UNKNOWN_PACKAGE, 4), (UNKNOWN_PACKAGE, 4))
    plan = plan_binding(topology, 1)
    assert plan.as_vllm_environment() == "0-2"
    assert "; NUMA node 1 with 4 cores stays idle" in text(plan)


def test_one_node_of_many_packages_is_one_place() -> None:
    """Virtual machines often show every CPU as a package of its own."""
    topology = machine((0, 8))
    cpus = tuple(replace(cpu, package=cpu.id) for cpu in topology.cpus)
    assert plan_binding(replace(topology, cpus=cpus), 1).as_vllm_environment() == "0-6"


def test_nodes_linked_through_a_third_belong_together() -> None:
    """Node 0 holds CPUs of the packages of both others."""
    topology = machine((0, 2), (0, 2), (1, 2))
    cpus = (*topology.cpus[:1], replace(topology.cpus[1], package=1), *topology.cpus[2:])
    assert plan_binding(replace(topology, cpus=cpus), 1).as_vllm_environment() == "0-4"


def test_packages_of_one_node_are_not_mixed() -> None:
    topology = machine((0, 8))
    cpus = tuple(replace(cpu, package=cpu.id % 2) for cpu in topology.cpus)
    plan = plan_binding(replace(topology, cpus=cpus), 2, reserved_cpus=0)
    assert plan.as_vllm_environment() == "0,2,4,6|1,3,5,7"


def test_ranks_are_spread_evenly_over_nodes() -> None:
    plan = plan_binding(machine((0, 4), (0, 4), (1, 4), (1, 4)), 5)
    assert plan.as_vllm_environment() == "0-1|2-3|4-5|8-9|12-13"


def test_larger_nodes_are_preferred_for_their_room_for_the_engine() -> None:
    plan = plan_binding(machine((0, 8), (1, 8), (2, 10)), 2)
    assert plan.as_vllm_environment() == "0-7|16-23"
    assert plan.engine_cpus == (24, 25)


def test_reserving_empties_the_smaller_nodes_first() -> None:
    plan = plan_binding(machine((0, 1), (0, 6), (0, 1)), 1, reserved_cpus=2)
    assert plan.as_vllm_environment() == "1-6"
    assert plan.ranks[0].nodes == (1,)


def test_sharing_is_explained() -> None:
    assert "ranks share NUMA nodes: there are fewer NUMA nodes" in plan_binding(TWO_NODES, 4).reasons


@pytest.mark.parametrize(
    ("cores", "environment"),
    [((8, 4), "0-3|8-11"), ((8, 2), "0-1|8-9"), ((8, 1), "0-2|4-6"), ((1, 8), "1-3|5-7")],
)
def test_nodes_of_different_size(cores: tuple[int, int], environment: str) -> None:
    plan = plan_binding(machine((0, cores[0]), (1, cores[1])), 2)
    assert plan.as_vllm_environment() == environment
    assert ("sizes differ a lot" in text(plan)) == (min(cores) == 1)
    assert ("1 cores stays idle" in text(plan)) == (min(cores) == 1)
    assert "--tensor-parallel-size" not in text(plan)


def test_larger_package_is_chosen_for_one_rank() -> None:
    assert plan_binding(machine((0, 4), (1, 6)), 1).as_vllm_environment() == "4-8"


def test_package_with_memory_is_chosen_for_one_rank() -> None:
    plan = plan_binding(machine((0, 4), (1, 4), memory=(0, 1 << 30)), 1)
    assert plan.as_vllm_environment() == "4-6"


def test_memory_that_the_cpuset_withholds() -> None:
    topology = replace(TWO_NODES, allowed_memory_nodes=frozenset({0}))
    plan = plan_binding(topology, 2)
    assert [rank.memory_nodes for rank in plan.ranks] == [(0,), (0,)]
    assert "rank 1: NUMA node 1 has no memory to use, node 0 is used" in plan.reasons


def test_nearest_memory_is_chosen() -> None:
    topology = machine((0, 2), (0, 0), (0, 0), memory=(0, 1 << 30, 1 << 30))
    far, near = (
        tuple(replace(node, distances=(10, *order)) for node in topology.nodes) for order in ((30, 80), (80, 30))
    )
    assert plan_binding(replace(topology, nodes=far), 1).ranks[0].memory_nodes == (1,)
    assert plan_binding(replace(topology, nodes=near), 1).ranks[0].memory_nodes == (2,)


def test_own_memory_is_chosen_where_distances_tell_nothing() -> None:
    topology = machine((0, 2), (1, 2))
    nodes = tuple(replace(node, distances=(10, 10)) for node in topology.nodes)
    plan = plan_binding(replace(topology, nodes=nodes), 2)
    assert [rank.memory_nodes for rank in plan.ranks] == [(0,), (1,)]


def test_memory_next_to_cpus_is_chosen_among_equally_near() -> None:
    topology = machine((0, 4), (0, 0), (1, 2), memory=(0, 1 << 30, 1 << 30))
    assert plan_binding(topology, 1).ranks[0].memory_nodes == (2,)


def test_no_memory_at_all() -> None:
    assert plan_binding(machine((0, 2), memory=(0,)), 1).ranks[0].memory_nodes == ()


def test_quota_smaller_than_ranks_warns() -> None:
    topology = replace(TWO_NODES, limits=CgroupLimits(cpu_quota=1.5))
    plan = plan_binding(topology, 2)
    assert plan.as_vllm_environment() == "0|8"
    assert plan.warnings == ("2 ranks under a CPU quota of 1.5 CPUs will be throttled",)


@pytest.mark.parametrize(("quota", "mentioned"), [(15.5, True), (16, False), (17, False)])
def test_quota_is_explained_where_it_limits(quota: float, mentioned: bool) -> None:
    topology = replace(TWO_NODES, limits=CgroupLimits(cpu_quota=quota))
    assert ("CPU quota" in text(plan_binding(topology, 2))) == mentioned


def test_ranks_that_share_cores_warn() -> None:
    plan = plan_binding(machine((0, 2), threads=2), 4)
    assert plan.warnings == ("4 ranks on 2 cores: ranks share cores",)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any machine: uneven nodes, several per package, SMT, CPUs withheld, a quota."""
    packages = draw(st.lists(st.sampled_from([UNKNOWN_PACKAGE, 0, 1, 7]), min_size=1, max_size=6))
    nodes = [(package, draw(st.integers(0, 9))) for package in packages]
    if not any(count for _, count in nodes):
        nodes[0] = (nodes[0][0], 1)
    memory = tuple(draw(st.sampled_from([None, 0, 1 << 30])) for _ in nodes)
    topology = machine(*nodes, memory=memory, threads=draw(st.integers(1, 2)))
    ids = [cpu.id for cpu in topology.cpus]
    allowed = draw(st.sets(st.sampled_from(ids), min_size=1) | st.just(set(ids)))
    quota = draw(st.none() | st.floats(0.1, 64))
    return replace(topology, allowed=frozenset(allowed), limits=CgroupLimits(cpu_quota=quota))


@settings(max_examples=300, deadline=None)
@given(
    topology=topologies(),
    ranks=st.integers(1, 8),
    replicas=st.integers(1, 3),
    reserved=st.none() | st.integers(0, 12),
    span=st.booleans(),
)
def test_plans_of_any_machine(topology: Topology, ranks: int, replicas: int, reserved: int | None, span: bool) -> None:
    workers = ranks * replicas
    plan_any = partial(plan_binding, topology, ranks, replicas=replicas, reserved_cpus=reserved, span_nodes=span)
    if workers > len(topology.allowed):
        with pytest.raises(BindingError, match="need at least one CPU each"):
            plan_any()
        return
    plan = plan_any()
    cpu_of = {cpu.id: cpu for cpu in topology.cpus}
    bound = [cpu for rank in plan.ranks for cpu in rank.cpus]

    assert [rank.rank for rank in plan.ranks] == list(range(workers))
    assert len({len(rank.cpus) for rank in plan.ranks}) == 1
    assert plan.ranks[0].cpus
    assert len(bound) == len(set(bound))
    assert topology.allowed.issuperset([*bound, *plan.engine_cpus])
    assert set(bound).isdisjoint(plan.engine_cpus)
    if not any("share cores" in warning for warning in plan.warnings):
        assert len({cpu_of[cpu].core for cpu in bound}) == len(bound)
    if topology.limits.cpu_quota is not None:
        limit = max(workers, int(topology.limits.cpu_quota))
        assert len(bound) + len(plan.engine_cpus) <= limit
    for rank in plan.ranks:
        assert rank.nodes == tuple(sorted({cpu_of[cpu].node for cpu in rank.cpus}))
        usable = {node.id for node in topology.nodes if topology.has_usable_memory(node)}
        assert usable.issuperset(rank.memory_nodes)
        if len(rank.nodes) > 1 and not span:
            assert len({cpu_of[cpu].package for cpu in rank.cpus}) == 1

    environment = plan.as_vllm_environment()
    assert [parse_cpu_list(entry) for entry in environment.split("|")] == [rank.cpus for rank in plan.ranks]
    again = plan_binding(topology, ranks, replicas=replicas, explicit=environment)
    assert again.ranks == plan.ranks
