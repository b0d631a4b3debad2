# SPDX-License-Identifier: Apache-2.0
"""Reading the topology: each kind of node, and everything that may be missing or malformed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.unit.topologies import (
    CPU_ROOT,
    GIB,
    MACHINES,
    NODE_ROOT,
    lay,
    mount_v2,
    put,
    read_machine,
)
from vllm_arm.runtime.topology import (
    UNKNOWN_PACKAGE,
    LogicalCpu,
    NumaNode,
    Topology,
    format_cpu_list,
    read_topology,
)


def read_all(root: Path, count: int = 256) -> Topology:
    """Read a tree for a process that may use every CPU."""
    return read_topology(root, frozenset(range(count)))


def test_smt_machine_field_by_field(tmp_path: Path) -> None:
    topology = read_machine(tmp_path, MACHINES["x86_smt"])
    assert topology == Topology(
        cpus=(
            LogicalCpu(0, core=0, package=0, node=0),
            LogicalCpu(1, core=1, package=0, node=0),
            LogicalCpu(2, core=0, package=0, node=0),
            LogicalCpu(3, core=1, package=0, node=0),
        ),
        nodes=(NumaNode(0, (0, 1, 2, 3), 8 * GIB, (10,)),),
        allowed=frozenset(range(4)),
        allowed_memory_nodes=frozenset({0}),
    )


def test_core_ids_that_repeat_between_packages(tmp_path: Path) -> None:
    machine = MACHINES["x86_two_sockets_smt"]
    lay(tmp_path, machine, siblings=False)
    by_core_id = read_all(tmp_path)
    assert [cpu.core for cpu in by_core_id.cpus] == [*range(8), *range(8)]
    assert by_core_id.cpus == read_machine(tmp_path / "with", machine).cpus


def test_sparse_package_and_core_ids(tmp_path: Path) -> None:
    topology = read_machine(tmp_path, MACHINES["neoverse_v2_two_sockets"])
    assert {cpu.package for cpu in topology.cpus} == {36, 5418}
    assert [cpu.core for cpu in topology.cpus] == list(range(192))


def test_gpu_memory_nodes(tmp_path: Path) -> None:
    topology = read_machine(tmp_path, MACHINES["grace_hopper"])
    assert [node.id for node in topology.nodes] == list(range(9))
    assert [len(node.cpus) for node in topology.nodes] == [72, *[0] * 8]
    assert [topology.has_usable_memory(node) for node in topology.nodes[:3]] == [True, True, False]
    assert topology.distance(0, 1) == 80


def test_sparse_node_ids(tmp_path: Path) -> None:
    topology = read_machine(tmp_path, MACHINES["grace_blackwell"])
    assert [node.id for node in topology.nodes] == [0, 1, 2, 10, 18, 26]
    assert (topology.distance(0, 1), topology.distance(1, 26)) == (40, 80)
    assert topology.notes == ()


def test_offline_cpus(tmp_path: Path) -> None:
    offline = frozenset({0, 5})
    lay(tmp_path, MACHINES["x86_two_sockets_smt"], offline=offline)
    topology = read_all(tmp_path)
    assert topology.offline == offline
    assert offline.isdisjoint(topology.allowed)
    assert {cpu.id: cpu.core for cpu in topology.cpus}[8] == 8
    assert topology.notes == ()


@pytest.mark.parametrize("missing", ["online", "present"])
def test_without_the_cpu_lists(tmp_path: Path, missing: str) -> None:
    lay(tmp_path, MACHINES["x86_smt"], offline=frozenset({3}))
    expected = read_all(tmp_path)
    (tmp_path / CPU_ROOT / missing).unlink()
    assert read_all(tmp_path) == expected


def test_without_node_directory(tmp_path: Path) -> None:
    lay(tmp_path, MACHINES["graviton3"], node_directory=False)
    topology = read_all(tmp_path)
    assert topology.nodes == (NumaNode(0, tuple(range(64)), 128 * GIB, (10,)),)
    assert topology.notes == ("/sys/devices/system/node lists no NUMA node: one node 0 with every CPU is assumed",)


def test_node_called_minus_one(tmp_path: Path) -> None:
    lay(tmp_path, MACHINES["two_cpus"], node_directory=False)
    put(tmp_path, f"{NODE_ROOT}/online", "-1")
    put(tmp_path, f"{NODE_ROOT}/node-1/cpulist", "0-1")
    topology = read_all(tmp_path)
    assert [(node.id, node.cpus) for node in topology.nodes] == [(0, (0, 1))]
    assert "node/online holds '-1' instead of a list" in topology.notes[0]


def test_cpus_that_no_node_lists_join_their_package(tmp_path: Path) -> None:
    lay(tmp_path, MACHINES["graviton4_two_sockets"])
    put(tmp_path, f"{NODE_ROOT}/node1/cpulist", "97-191")
    topology = read_all(tmp_path)
    assert topology.nodes[1].cpus == tuple(range(96, 192))
    assert topology.notes == ("no NUMA node lists CPUs 96: put on node 1",)


@pytest.mark.parametrize(("node", "orphan", "home"), [(1, 32, 0), (6, 192, 4)])
def test_orphan_of_a_package_with_several_nodes(tmp_path: Path, node: int, orphan: int, home: int) -> None:
    lay(tmp_path, MACHINES["altra_max_quadrants"])
    put(tmp_path, f"{NODE_ROOT}/node{node}/cpulist", f"{orphan + 1}-{orphan + 31}")
    assert {cpu.id: cpu.node for cpu in read_all(tmp_path).cpus}[orphan] == home


def test_no_node_lists_any_cpu(tmp_path: Path) -> None:
    lay(tmp_path, MACHINES["graviton4_two_sockets"])
    for node in (0, 1):
        put(tmp_path, f"{NODE_ROOT}/node{node}/cpulist", "")
    topology = read_all(tmp_path)
    assert [len(node.cpus) for node in topology.nodes] == [192, 0]
    assert topology.notes == ("no NUMA node lists CPUs 0-191: put on node 0",)


@pytest.mark.parametrize("present", [True, False])
def test_without_core_topology(tmp_path: Path, present: bool) -> None:
    lay(tmp_path, MACHINES["two_cpus"], core_topology=False)
    if present:
        for cpu in (0, 1):
            put(tmp_path, f"{CPU_ROOT}/cpu{cpu}/topology/core_id", "-1")
            put(tmp_path, f"{CPU_ROOT}/cpu{cpu}/topology/physical_package_id", "-1")
    topology = read_all(tmp_path)
    assert topology.cpus == tuple(LogicalCpu(cpu, cpu, UNKNOWN_PACKAGE, 0) for cpu in (0, 1))
    assert topology.notes == ("no core topology for CPUs 0-1: each is taken as a core of its own",)


def test_without_sysfs(tmp_path: Path) -> None:
    topology = read_topology(tmp_path, frozenset({3, 1}))
    assert [cpu.id for cpu in topology.cpus] == [1, 3]
    assert topology.nodes == (NumaNode(0, (1, 3), None, (10,)),)
    assert topology.allowed == {1, 3}
    assert topology.has_usable_memory(topology.nodes[0])
    assert topology.notes[0] == (
        "/sys/devices/system/cpu lists no CPU: the 2 CPUs of the affinity mask are taken, each as a core of its own"
    )


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"{CPU_ROOT}/online", "a list such as 0-3,8: CPU directories used"),
        (f"{CPU_ROOT}/present", "a list such as 0-3,8: CPU directories used"),
        (f"{CPU_ROOT}/cpu1/topology/thread_siblings_list", "a list such as 0-3,8: core_id used"),
        (f"{NODE_ROOT}/online", "a list such as 0-3,8: node directories used"),
        (f"{NODE_ROOT}/node0/distance", "2 distances: 10 and 20 assumed"),
    ],
)
def test_malformed_file_with_a_substitute(tmp_path: Path, path: str, expected: str) -> None:
    expected_topology = read_machine(tmp_path, MACHINES["graviton4_two_sockets"])
    put(tmp_path, path, "gar\0bage")
    topology = read_all(tmp_path)
    assert topology.notes == (f"/{path} holds 'gar\\x00bage' instead of {expected}",)
    assert topology.cpus == expected_topology.cpus
    assert topology.distance(0, 1) == expected_topology.distance(0, 1) == 20


def test_malformed_file_without_a_substitute(tmp_path: Path) -> None:
    lay(tmp_path, MACHINES["two_cpus"], siblings=False)
    put(tmp_path, f"{NODE_ROOT}/node0/cpulist", "zero")
    put(tmp_path, f"{NODE_ROOT}/node0/meminfo", "plenty")
    put(tmp_path, f"{CPU_ROOT}/cpu0/topology/core_id", "first")
    put(tmp_path, f"{CPU_ROOT}/cpu0/topology/physical_package_id", "left")
    topology = read_all(tmp_path)
    assert topology.cpus == (LogicalCpu(0, 0, UNKNOWN_PACKAGE, 0), LogicalCpu(1, 1, 0, 0))
    assert topology.nodes == (NumaNode(0, (0, 1), None, (10,)),)
    assert topology.notes == (
        f"/{CPU_ROOT}/cpu0/topology/physical_package_id holds 'left' instead of a number: package unknown",
        f"/{CPU_ROOT}/cpu0/topology/core_id holds 'first' instead of a number: taken as a core of its own",
        "no core topology for CPUs 0: each is taken as a core of its own",
        f"/{NODE_ROOT}/node0/cpulist holds 'zero' instead of a list such as 0-3,8: its CPUs are unknown",
        f"/{NODE_ROOT}/node0/meminfo holds 'plenty' instead of a line MemTotal: N kB: the size is unknown",
        "no NUMA node lists CPUs 0-1: put on node 0",
    )


def test_siblings_that_leave_out_the_cpu_itself_are_not_believed(tmp_path: Path) -> None:
    lay(tmp_path, MACHINES["x86_smt"])
    put(tmp_path, f"{CPU_ROOT}/cpu2/topology/thread_siblings_list", "1,3")
    assert [cpu.core for cpu in read_all(tmp_path).cpus] == [0, 1, 2, 1]


def test_binary_content(tmp_path: Path) -> None:
    lay(tmp_path, MACHINES["two_cpus"])
    (tmp_path / CPU_ROOT / "online").write_bytes(b"\xff\xfe\x00")
    topology = read_all(tmp_path)
    assert topology.allowed == {0, 1}
    assert len(topology.notes) == 1


def test_missing_distance_and_meminfo(tmp_path: Path) -> None:
    lay(tmp_path, MACHINES["graviton4_two_sockets"])
    for name in ("distance", "meminfo"):
        (tmp_path / NODE_ROOT / "node1" / name).unlink()
    topology = read_all(tmp_path)
    assert topology.nodes[1].memory_bytes is None
    assert topology.distance(1, 0) == 20
    assert topology.distance(1, 1) == 10


def test_distances_for_another_number_of_nodes(tmp_path: Path) -> None:
    lay(tmp_path, MACHINES["graviton4_two_sockets"])
    put(tmp_path, f"{NODE_ROOT}/node1/distance", "10")
    topology = read_all(tmp_path)
    assert topology.distance(1, 0) == 20
    assert topology.notes == (f"/{NODE_ROOT}/node1/distance holds '10' instead of 2 distances: 10 and 20 assumed",)


def test_listed_node_without_directory(tmp_path: Path) -> None:
    lay(tmp_path, MACHINES["graviton4_two_sockets"])
    shutil.rmtree(tmp_path / NODE_ROOT / "node1")
    topology = read_all(tmp_path)
    assert [node.id for node in topology.nodes] == [0]
    assert topology.notes[-1] == "no NUMA node lists CPUs 96-191: put on node 0"


def test_affinity_and_cpuset_both_restrict(tmp_path: Path) -> None:
    lay(tmp_path, MACHINES["graviton4"])
    put(mount_v2(tmp_path), "cpuset.cpus.effective", "8-15")
    assert read_topology(tmp_path, frozenset(range(12))).allowed == {8, 9, 10, 11}


def test_cpuset_without_a_usable_cpu(tmp_path: Path) -> None:
    lay(tmp_path, MACHINES["two_cpus"])
    put(mount_v2(tmp_path), "cpuset.cpus.effective", "8-15")
    topology = read_all(tmp_path)
    assert topology.allowed == {0, 1}
    assert topology.notes == ("the cpuset 8-15 holds none of the CPUs 0-1: ignored",)


def test_affinity_without_a_usable_cpu(tmp_path: Path) -> None:
    lay(tmp_path, MACHINES["two_cpus"])
    topology = read_topology(tmp_path, frozenset({7}))
    assert topology.allowed == {0, 1}
    assert topology.notes == ("the affinity mask 7 holds no online CPU (0-1): ignored",)


@pytest.mark.parametrize("source", ["cpuset", "status"])
def test_memory_nodes_that_the_cpuset_permits(tmp_path: Path, source: str) -> None:
    lay(tmp_path, MACHINES["graviton4_two_sockets"])
    if source == "cpuset":
        put(mount_v2(tmp_path), "cpuset.mems.effective", "1")
    else:
        put(tmp_path, "proc/self/status", "Name:\tx\nMems_allowed_list:\t1\nThreads:\t1")
    topology = read_all(tmp_path)
    assert topology.allowed_memory_nodes == {1}
    assert not topology.has_usable_memory(topology.nodes[0])


@pytest.mark.parametrize("listed", ["7", "some"])
def test_memory_nodes_that_make_no_sense(tmp_path: Path, listed: str) -> None:
    lay(tmp_path, MACHINES["two_cpus"])
    put(tmp_path, "proc/self/status", f"Mems_allowed_list:\t{listed}")
    topology = read_all(tmp_path)
    assert topology.allowed_memory_nodes == {0}
    assert topology.notes[-1].endswith("ignored")


def test_notes_of_the_cgroup_are_kept(tmp_path: Path) -> None:
    lay(tmp_path, MACHINES["two_cpus"])
    put(mount_v2(tmp_path), "cpu.max", "some")
    assert "/sys/fs/cgroup/cpu.max holds 'some'" in read_all(tmp_path).notes[0]


def test_this_machine() -> None:
    topology = read_topology()
    assert topology.allowed == os.sched_getaffinity(0), format_cpu_list(topology.allowed)
    assert topology.cpus
