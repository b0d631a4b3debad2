# SPDX-License-Identifier: Apache-2.0
"""The exact binding on every recorded machine, through its sysfs tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.unit.topologies import MACHINES, lay, mount_v2, put, read_machine
from vllm_arm.runtime.binding import plan_binding
from vllm_arm.runtime.cgroup import CgroupLimits
from vllm_arm.runtime.topology import Topology, format_cpu_list, read_topology

Recorded = Callable[[str], Topology]

# Machine, ranks, VLLM_CPU_OMP_THREADS_BIND, CPUs left to the engine.
PLANS = [
    ("graviton2", 1, "0-62", "63"),
    ("graviton2", 2, "0-30|32-62", "31,63"),
    ("graviton2", 3, "0-19|21-40|42-61", "20,41,62-63"),
    ("graviton2", 4, "0-14|16-30|32-46|48-62", "15,31,47,63"),
    ("graviton3", 1, "0-62", "63"),
    ("graviton3", 2, "0-30|32-62", "31,63"),
    ("graviton3", 4, "0-14|16-30|32-46|48-62", "15,31,47,63"),
    ("graviton3", 5, "0-11|12-23|24-35|36-47|48-59", "60-63"),
    ("graviton4", 1, "0-94", "95"),
    ("graviton4", 2, "0-46|48-94", "47,95"),
    ("graviton4", 3, "0-30|32-62|64-94", "31,63,95"),
    ("graviton4", 4, "0-22|24-46|48-70|72-94", "23,47,71,95"),
    ("graviton4_two_sockets", 1, "0-94", "95"),
    ("graviton4_two_sockets", 2, "0-94|96-190", "95,191"),
    ("graviton4_two_sockets", 3, "0-47|48-95|96-143", "144-191"),
    ("graviton4_two_sockets", 4, "0-46|48-94|96-142|144-190", "47,95,143,191"),
    ("grace_hopper", 1, "0-70", "71"),
    ("grace_hopper", 2, "0-34|36-70", "35,71"),
    ("grace_hopper", 3, "0-22|24-46|48-70", "23,47,71"),
    ("grace_hopper", 4, "0-16|18-34|36-52|54-70", "17,35,53,71"),
    ("grace_grace", 1, "0-70", "71"),
    ("grace_grace", 2, "0-70|72-142", "71,143"),
    ("grace_grace", 3, "0-35|36-71|72-107", "108-143"),
    ("grace_grace", 4, "0-34|36-70|72-106|108-142", "35,71,107,143"),
    ("grace_blackwell", 1, "0-70", "71"),
    ("grace_blackwell", 2, "0-70|72-142", "71,143"),
    ("grace_blackwell", 4, "0-34|36-70|72-106|108-142", "35,71,107,143"),
    ("altra_max_two_sockets", 1, "0-126", "127"),
    ("altra_max_two_sockets", 2, "0-126|128-254", "127,255"),
    ("altra_max_two_sockets", 3, "0-63|64-127|128-191", "192-255"),
    ("altra_max_two_sockets", 4, "0-62|64-126|128-190|192-254", "63,127,191,255"),
    ("altra_max_quadrants", 1, "0-126", "127"),
    ("altra_max_quadrants", 2, "0-126|128-254", "127,255"),
    ("altra_max_quadrants", 3, "0-63|64-127|128-191", "192-255"),
    ("altra_max_quadrants", 4, "0-62|64-126|128-190|192-254", "63,127,191,255"),
    ("altra_max_quadrants", 5, "0-31|32-63|64-95|96-127|128-159", "160-255"),
    (
        "altra_max_quadrants",
        8,
        "0-30|32-62|64-94|96-126|128-158|160-190|192-222|224-254",
        "31,63,95,127,159,191,223,255",
    ),
    ("neoverse_v2_two_sockets", 1, "0-94", "95"),
    ("neoverse_v2_two_sockets", 2, "0-94|96-190", "95,191"),
    ("neoverse_v2_two_sockets", 4, "0-46|48-94|96-142|144-190", "47,95,143,191"),
    ("cobalt100_vm", 1, "0-62", "63"),
    ("cobalt100_vm", 2, "0-30|32-62", "31,63"),
    ("cobalt100_vm", 4, "0-14|16-30|32-46|48-62", "15,31,47,63"),
    ("axion", 1, "0-70", "71"),
    ("axion", 2, "0-34|36-70", "35,71"),
    ("axion", 4, "0-16|18-34|36-52|54-70", "17,35,53,71"),
    ("axion", 7, "0-9|10-19|20-29|30-39|40-49|50-59|60-69", "70-71"),
    ("x86_smt", 1, "0", "1,3"),
    ("x86_smt", 2, "0|1", "2-3"),
    ("x86_smt", 3, "0|1|2", "3"),
    ("x86_smt", 4, "0|1|2|3", ""),
    ("x86_two_sockets_smt", 1, "0-2", "3,11"),
    ("x86_two_sockets_smt", 2, "0-2|4-6", "3,7,11,15"),
    ("x86_two_sockets_smt", 3, "0-1|2-3|4-5", "6-7,14-15"),
    ("x86_two_sockets_smt", 4, "0|2|4|6", "1,3,5,7,9,11,13,15"),
    ("cxl_expander", 1, "0-14", "15"),
    ("cxl_expander", 2, "0-6|8-14", "7,15"),
    ("memoryless_node", 1, "0-6", "7"),
    ("memoryless_node", 2, "0-6|8-14", "7,15"),
    ("two_cpus", 1, "0", "1"),
    ("two_cpus", 2, "0|1", ""),
    ("one_cpu", 1, "0", ""),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Reads a machine by name; each tree is laid once, since the large ones take a while."""

    @cache
    def read(name: str) -> Topology:
        return read_machine(tmp_path_factory.mktemp(name), MACHINES[name])

    return read


@pytest.mark.parametrize(("name", "ranks", "environment", "engine"), PLANS)
def test_plan(recorded: Recorded, name: str, ranks: int, environment: str, engine: str) -> None:
    plan = plan_binding(recorded(name), ranks)
    assert plan.as_vllm_environment() == environment
    assert format_cpu_list(plan.engine_cpus) == engine


def test_every_machine_has_a_plan_and_reads_without_fallback(recorded: Recorded) -> None:
    assert {plan[0] for plan in PLANS} == set(MACHINES)
    assert {name: recorded(name).notes for name in MACHINES} == dict.fromkeys(MACHINES, ())


@pytest.mark.parametrize(
    ("name", "ranks", "nodes", "memory_nodes"),
    [
        ("grace_hopper", 1, [(0,)], [(0,)]),
        ("grace_blackwell", 2, [(0,), (1,)], [(0,), (1,)]),
        ("altra_max_quadrants", 1, [(0, 1, 2, 3)], [(0, 1, 2, 3)]),
        ("altra_max_quadrants", 2, [(0, 1, 2, 3), (4, 5, 6, 7)], [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("altra_max_quadrants", 3, [(0, 1), (2, 3), (4, 5)], [(0, 1), (2, 3), (4, 5)]),
        ("cxl_expander", 1, [(0,)], [(0,)]),
        ("memoryless_node", 2, [(0,), (1,)], [(0,), (0,)]),
    ],
)
def test_nodes_and_memory(
    recorded: Recorded,
    name: str,
    ranks: int,
    nodes: list[tuple[int, ...]],
    memory_nodes: list[tuple[int, ...]],
) -> None:
    plan = plan_binding(recorded(name), ranks)
    assert [rank.nodes for rank in plan.ranks] == nodes
    assert [rank.memory_nodes for rank in plan.ranks] == memory_nodes


@pytest.mark.parametrize(
    ("name", "replicas", "ranks", "environment"),
    [
        ("graviton4_two_sockets", 2, 1, "0-94|96-190"),
        ("graviton4_two_sockets", 2, 2, "0-46|48-94|96-142|144-190"),
        ("altra_max_quadrants", 2, 2, "0-62|64-126|128-190|192-254"),
        ("altra_max_quadrants", 4, 1, "0-62|64-126|128-190|192-254"),
        ("graviton3", 2, 2, "0-14|16-30|32-46|48-62"),
    ],
)
def test_replicas_keep_their_ranks_together(
    recorded: Recorded, name: str, replicas: int, ranks: int, environment: str
) -> None:
    assert plan_binding(recorded(name), ranks, replicas=replicas).as_vllm_environment() == environment


@pytest.mark.parametrize(
    ("name", "environment"),
    [("graviton4_two_sockets", "0-190"), ("altra_max_quadrants", "0-254")],
)
def test_one_rank_over_the_whole_machine(recorded: Recorded, name: str, environment: str) -> None:
    topology = recorded(name)
    plan = plan_binding(topology, 1, span_nodes=True)
    assert plan.as_vllm_environment() == environment
    assert plan.ranks[0].nodes == tuple(node.id for node in topology.nodes)


@pytest.mark.parametrize(
    ("cpuset", "ranks", "environment", "engine"),
    [
        ("8-23", 1, "8-22", "23"),
        ("90-101", 1, "90-94", "95"),
        ("90-101", 2, "90-94|96-100", "95,101"),
        ("0,2,4,6,8", 2, "0|4", "2,6,8"),
        ("0-94,96", 2, "0-45|47-92", "46,93-94"),
    ],
)
def test_container_with_a_cpuset(tmp_path: Path, cpuset: str, ranks: int, environment: str, engine: str) -> None:
    machine = MACHINES["graviton4_two_sockets"]
    put(mount_v2(lay(tmp_path, machine)), "cpuset.cpus.effective", cpuset)
    plan = plan_binding(read_topology(tmp_path, frozenset(machine.cpu_ids)), ranks)
    assert plan.as_vllm_environment() == environment
    assert format_cpu_list(plan.engine_cpus) == engine


@pytest.mark.parametrize(
    ("name", "quota", "ranks", "environment", "engine"),
    [
        ("graviton4", 8, 1, "0-6", "7"),
        ("graviton4", 8, 2, "0-2|4-6", "3,7"),
        ("graviton4", 8, 3, "0-1|2-3|4-5", "6-7"),
        ("graviton4", 7.9, 1, "0-5", "6"),
        ("graviton4", 2.5, 1, "0", "1"),
        ("graviton4", 1, 1, "0", ""),
        ("graviton4", 0.5, 1, "0", ""),
        ("graviton4", 96, 1, "0-94", "95"),
        ("graviton4_two_sockets", 100, 1, "0-94", "95"),
        ("altra_max_quadrants", 8, 1, "0-6", "7"),
        ("altra_max_quadrants", 8, 2, "0-2|128-130", "3,131"),
        ("x86_two_sockets_smt", 3, 1, "0-1", "2"),
    ],
)
def test_quota(recorded: Recorded, *, name: str, quota: float, ranks: int, environment: str, engine: str) -> None:
    topology = replace(recorded(name), limits=CgroupLimits(cpu_quota=quota))
    plan = plan_binding(topology, ranks)
    assert plan.as_vllm_environment() == environment
    assert format_cpu_list(plan.engine_cpus) == engine


def test_container_with_a_quota(tmp_path: Path) -> None:
    machine = MACHINES["graviton4"]
    put(mount_v2(lay(tmp_path, machine)), "cpu.max", "800000 100000")
    topology = read_topology(tmp_path, frozenset(machine.cpu_ids))
    assert plan_binding(topology, 1).as_vllm_environment() == "0-6"


def test_container_without_node_directory(tmp_path: Path) -> None:
    machine = MACHINES["neoverse_v2_two_sockets"]
    lay(tmp_path, machine, node_directory=False)
    topology = read_topology(tmp_path, frozenset(machine.cpu_ids))
    assert plan_binding(topology, 1).as_vllm_environment() == "0-190"
    assert plan_binding(topology, 2).as_vllm_environment() == "0-94|96-190"


def test_offline_cpus(tmp_path: Path) -> None:
    machine = MACHINES["graviton4_two_sockets"]
    lay(tmp_path, machine, offline=frozenset({0, 50, 191}))
    topology = read_topology(tmp_path, frozenset(machine.cpu_ids))
    assert plan_binding(topology, 2).as_vllm_environment() == "1-49,51-94|96-188"


def test_without_sysfs(tmp_path: Path) -> None:
    topology = read_topology(tmp_path, frozenset(range(4, 12)))
    assert plan_binding(topology, 2).as_vllm_environment() == "4-6|8-10"
