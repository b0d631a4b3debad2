# SPDX-License-Identifier: Apache-2.0
"""Where processes and their memory are put, and what the kernel says of it."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_arm.runtime import placement
from vllm_arm.runtime.binding import BindingPlan, RankBinding

PLAN = BindingPlan(
    ranks=(
        RankBinding(0, (0, 1), (0,), (0,)),
        RankBinding(1, (2, 3), (0,), (0,)),
        RankBinding(2, (8, 9), (1, 2), (1, 2)),
        RankBinding(3, (16,), (3,), (2,)),
    ),
    engine_cpus=(4, 5),
    reasons=("because",),
    warnings=("slow",),
)

NUMA_MAPS = """\
5581aab4e000 default file=/usr/bin/python mapped=100 N0=60 N1=40 kernelpagesize_kB=4
5581aab50000 default file=/usr/bin/python anon=3 dirty=3 N1=3 kernelpagesize_kB=4
7f0000000000 bind:0 anon=30 dirty=30 N0=25 N1=5 kernelpagesize_kB=4
7f0100000000 bind:0 huge anon=2 dirty=2 N1=2 kernelpagesize_kB=2048
7f0200000000 bind:0
7ffd00000000 default stack anon=2 dirty=2 N0=2 kernelpagesize_kB=4
"""


@pytest.fixture
def keep_affinity() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


def test_a_plan_survives_the_way_to_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placement.inherited_plan() is None
    monkeypatch.setenv(placement.PLAN_VARIABLE, PLAN.to_json())
    assert placement.inherited_plan() == PLAN
    assert placement.inherited_rank(2) == (PLAN, PLAN.ranks[2])
    assert placement.inherited_rank(4) is None


def test_a_replica_finds_its_ranks() -> None:
    assert placement.index_of_rank(1, 2, None) == 1
    assert placement.index_of_rank(1, 2, 3) == 7


def test_ranks_share_the_memory_of_a_node() -> None:
    assert [PLAN.sharers(rank) for rank in range(4)] == [2, 2, 2, 2]
    alone = BindingPlan((RankBinding(0, (0,), (0,), ()),), (), ())
    assert alone.sharers(0) == 1


def test_memory_is_divided_among_sharers_and_the_group_limit_among_all() -> None:
    assert placement.memory_share([(100, 90), (100, 50)], 1, 1, None, None) == (200, 140)
    assert placement.memory_share([(100, 90)], 2, 2, None, None) == (50, 90)
    assert placement.memory_share([(100, 90)], 1, 4, 120, 40) == (30, 80)
    assert placement.memory_share([(100, 90)], 1, 1, 50, 60) == (50, 0)


def test_numa_maps_count_anonymous_pages_of_every_size() -> None:
    found = placement.parse_numa_maps(NUMA_MAPS, [0])
    assert found.by_node == {0: 27 * 4096, 1: 5 * 4096 + 2 * (2 << 20)}
    assert found.wanted == 27 * 4096
    assert found.share == pytest.approx(27 * 4096 / (32 * 4096 + (4 << 20)))
    assert placement.parse_numa_maps("", [0]).share == 1


def test_numa_maps_of_this_process_and_of_none(tmp_path: Path) -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel is built without NUMA")
    nodes = [int(path.name[4:]) for path in Path("/sys/devices/system/node").glob("node[0-9]*")]
    found = placement.read_memory_placement(os.getpid(), nodes)
    assert found is not None
    assert found.share == 1
    assert found.total > 1 << 20
    assert placement.read_memory_placement(None, nodes, tmp_path) is None


def test_every_thread_moves(keep_affinity: None, caplog: pytest.LogCaptureFixture) -> None:
    allowed = os.sched_getaffinity(0)
    wanted = {max(allowed)}
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        placement.bind_process([], "EngineCore")
        assert os.sched_getaffinity(0) == allowed
        placement.bind_process(sorted(wanted), "EngineCore")
        assert thread.native_id is not None
        assert os.sched_getaffinity(thread.native_id) == wanted
        os.sched_setaffinity(thread.native_id, allowed)
    finally:
        stop.set()
        thread.join()
        assert placement.move_process(sorted(allowed), "the test")


def test_a_child_starts_on_its_cpus_and_the_parent_stays() -> None:
    before = os.sched_getaffinity(0)
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    with placement.children_on([max(before)]):
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == f"[{max(before)}]"
    assert os.sched_getaffinity(0) == before


def test_cpus_that_are_not_there_are_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(placement, "warn_once_in_process_tree", messages.append)
    before = os.sched_getaffinity(0)
    with placement.children_on([9999]):
        assert os.sched_getaffinity(0) == before
    placement.bind_process([9999], "API server")
    assert messages == [
        "a worker cannot start on CPUs 9999: Invalid argument",
        "API server is not bound to CPUs 9999: Invalid argument",
    ]


@pytest.mark.parametrize(
    ("program", "expected"),
    [("/usr/bin/vllm", True), ("/x/openai/api_server.py", True), ("/home/me/batch.py", False), ("", False)],
)
def test_only_a_server_is_bound(monkeypatch: pytest.MonkeyPatch, program: str, expected: bool) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    assert placement.is_server() is expected
