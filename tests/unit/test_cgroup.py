# SPDX-License-Identifier: Apache-2.0
"""Control group limits, and the kernel's CPU list format."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.topologies import mount_v1, mount_v2, put
from vllm_arm.runtime.cgroup import (
    MAX_CPU_ID,
    CgroupLimits,
    format_cpu_list,
    parse_cpu_list,
    read_limits,
)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("0", (0,)),
        ("0-3,8", (0, 1, 2, 3, 8)),
        (" 5 , 2-4\n", (2, 3, 4, 5)),
        ("1-3,2-4,2", (1, 2, 3, 4)),
        ("7-7", (7,)),
        ("", ()),
        ("\n", ()),
    ],
)
def test_parse_cpu_list(text: str, ids: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == ids


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "'a' in 'a' is neither a number nor a range a-b"),
        ("0,,1", "'' in '0,,1' is neither"),
        ("0,", "'' in '0,' is neither"),
        ("-1", "'-1' in '-1' is neither"),
        ("0-", "'0-' in '0-' is neither"),
        ("1-2-3", "'1-2-3' in '1-2-3' is neither"),
        ("0-7:2/4", "neither"),
        ("0x1", "neither"),
        ("٣", "neither"),
        ("1-0", "range '1-0' in '1-0' runs backwards"),
        ("0-999999999", f"exceeds the largest id {MAX_CPU_ID}"),
        ("0-99999999999999999999", "neither"),
    ],
)
def test_parse_cpu_list_rejects(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_cpu_list(text)
    assert message in str(error.value)


def test_format_cpu_list() -> None:
    assert format_cpu_list([8, 0, 2, 1, 8]) == "0-2,8"
    assert format_cpu_list([]) == ""


@given(st.sets(st.integers(0, MAX_CPU_ID), max_size=40))
def test_cpu_list_round_trip(ids: set[int]) -> None:
    assert parse_cpu_list(format_cpu_list(ids)) == tuple(sorted(ids))


def test_no_cgroups(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == CgroupLimits()


def test_v2_container_with_its_own_namespace(tmp_path: Path) -> None:
    group = mount_v2(tmp_path)
    put(group, "cpu.max", "800000 100000")
    put(group, "cpuset.cpus.effective", "0-7,16")
    put(group, "cpuset.mems.effective", "0")
    put(group, "memory.max", "68719476736")
    assert read_limits(tmp_path) == CgroupLimits(
        cpuset=frozenset({*range(8), 16}),
        cpu_quota=8.0,
        memory_bytes=64 << 30,
        memory_nodes=frozenset({0}),
    )


def test_v2_tightest_limit_on_the_way_up_wins(tmp_path: Path) -> None:
    mount = mount_v2(tmp_path, "/kubepods/pod1/vllm")
    put(mount, "kubepods/cpu.max", "1600000 100000")
    put(mount, "kubepods/memory.max", "max")
    put(mount, "kubepods/pod1/cpu.max", "250000 100000")
    put(mount, "kubepods/pod1/memory.max", "1000")
    put(mount, "kubepods/pod1/cpuset.cpus.effective", "0-3")
    put(mount, "kubepods/pod1/vllm/cpu.max", "max 100000")
    put(mount, "kubepods/pod1/vllm/memory.max", "2000")
    limits = read_limits(tmp_path)
    assert (limits.cpu_quota, limits.memory_bytes) == (2.5, 1000)
    assert limits.cpuset == frozenset(range(4))


def test_v2_innermost_cpuset_wins_and_an_empty_one_inherits(tmp_path: Path) -> None:
    mount = mount_v2(tmp_path, "/a/b/c")
    put(mount, "a/cpuset.cpus.effective", "0-7")
    put(mount, "a/b/cpuset.cpus.effective", "0-3")
    put(mount, "a/b/c/cpuset.cpus.effective", "")
    assert read_limits(tmp_path).cpuset == frozenset(range(4))


def test_v2_unlimited(tmp_path: Path) -> None:
    group = mount_v2(tmp_path)
    put(group, "cpu.max", "max 100000")
    put(group, "memory.max", "max")
    assert read_limits(tmp_path) == CgroupLimits()


@pytest.mark.parametrize("group", ["/outside/the/mount", "/../..", "/gone"])
def test_group_that_the_mount_does_not_show(tmp_path: Path, group: str) -> None:
    mount = mount_v2(tmp_path, group)
    put(mount, "cpu.max", "400000 100000")
    put(tmp_path, "sys/cpu.max", "100000 100000")
    assert read_limits(tmp_path).cpu_quota == 4.0


def test_mount_of_the_container_s_own_part_of_the_hierarchy(tmp_path: Path) -> None:
    mount = mount_v1(tmp_path, "/docker/abc/inner", top="/docker/abc")
    put(mount, "cpu,cpuacct/cpu.cfs_quota_us", "600000")
    put(mount, "cpu,cpuacct/cpu.cfs_period_us", "100000")
    put(mount, "cpu,cpuacct/inner/cpu.cfs_quota_us", "50000")
    put(mount, "cpu,cpuacct/inner/cpu.cfs_period_us", "100000")
    assert read_limits(tmp_path).cpu_quota == 0.5


def test_v1(tmp_path: Path) -> None:
    mount = mount_v1(tmp_path, "/slurm/job")
    put(mount, "cpu,cpuacct/slurm/job/cpu.cfs_quota_us", "-1")
    put(mount, "cpu,cpuacct/slurm/job/cpu.cfs_period_us", "100000")
    put(mount, "cpu,cpuacct/slurm/cpu.cfs_quota_us", "300000")
    put(mount, "cpu,cpuacct/slurm/cpu.cfs_period_us", "100000")
    put(mount, "cpuset/slurm/job/cpuset.cpus", "4-7")
    put(mount, "cpuset/slurm/job/cpuset.mems", "1")
    put(mount, "cpuset/cpuset.cpus", "0-7")
    put(mount, "memory/slurm/job/memory.limit_in_bytes", "9223372036854710272")
    put(mount, "memory/slurm/memory.limit_in_bytes", "4096")
    assert read_limits(tmp_path) == CgroupLimits(
        cpuset=frozenset({4, 5, 6, 7}),
        cpu_quota=3.0,
        memory_bytes=4096,
        memory_nodes=frozenset({1}),
    )


def test_v1_unlimited(tmp_path: Path) -> None:
    """Without a limit the kernel writes the largest whole number of pages, here of 64 KiB."""
    mount = mount_v1(tmp_path)
    put(mount, "memory/memory.limit_in_bytes", "9223372036854710272")
    put(mount, "cpu,cpuacct/cpu.cfs_quota_us", "-1")
    put(mount, "cpu,cpuacct/cpu.cfs_period_us", "100000")
    assert read_limits(tmp_path) == CgroupLimits()


def test_hybrid_reads_both_versions(tmp_path: Path) -> None:
    mount = mount_v1(tmp_path, unified=True)
    put(mount, "cpu,cpuacct/cpu.cfs_quota_us", "300000")
    put(mount, "cpu,cpuacct/cpu.cfs_period_us", "100000")
    put(mount, "unified/cpu.max", "200000 100000")
    put(mount, "cpuset/cpuset.effective_cpus", "0-1")
    limits = read_limits(tmp_path)
    assert (limits.cpu_quota, limits.cpuset) == (2.0, frozenset({0, 1}))


def test_mount_point_with_a_blank(tmp_path: Path) -> None:
    mount_v2(tmp_path, point="/sys/fs/c\\040group")
    put(tmp_path, "sys/fs/c group/cpu.max", "100000 50000")
    assert read_limits(tmp_path).cpu_quota == 2.0


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("cpu.max", "lots", "a quota and a period in microseconds"),
        ("cpu.max", "100000 0", "a quota and a period in microseconds"),
        ("cpu.max", "-5 100000", "a quota and a period in microseconds"),
        ("cpu.max", "", "a quota and a period in microseconds"),
        ("memory.max", "1G", "a number of bytes"),
        ("cpuset.cpus.effective", "all", "a list such as 0-3,8"),
    ],
)
def test_malformed_files_are_ignored_and_noted(tmp_path: Path, name: str, text: str, expected: str) -> None:
    put(mount_v2(tmp_path), name, text)
    limits = read_limits(tmp_path)
    assert limits == CgroupLimits(notes=(f"/sys/fs/cgroup/{name} holds {text!r} instead of {expected}: ignored",))


def test_malformed_v1_quota(tmp_path: Path) -> None:
    mount = mount_v1(tmp_path)
    put(mount, "cpu,cpuacct/cpu.cfs_quota_us", "100000")
    put(mount, "cpu,cpuacct/cpu.cfs_period_us", "?")
    limits = read_limits(tmp_path)
    assert limits.cpu_quota is None
    assert "cpu.cfs_quota_us holds '100000 ?'" in limits.notes[0]


def test_malformed_process_files(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/cgroup", "nonsense")
    put(tmp_path, "proc/self/mountinfo", "30 22 0:26\n30 22 0:26 / /x rw - cgroup2")
    assert read_limits(tmp_path).notes == ("/proc/self/cgroup has a malformed line 'nonsense': ignored",)
