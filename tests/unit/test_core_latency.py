# SPDX-License-Identifier: Apache-2.0
"""vllm-arm topology --latency."""

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.unit.topologies import MACHINES, lay
from vllm_arm import _host
from vllm_arm.cli.main import main
from vllm_arm.runtime import core_latency, topology

CPUS = sorted(os.sched_getaffinity(0))
SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def two_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> topology.Topology:
    """Two sockets of four cores with two hardware threads each; latencies are by distance."""
    machine = MACHINES["x86_two_sockets_smt"]
    found = topology.read_topology(lay(tmp_path / "machine", machine), frozenset(machine.cpu_ids))
    monkeypatch.setattr(topology, "read_topology", lambda: found)

    def pair(first: int, second: int, *_: int) -> float:
        return 30.0 + abs(first - second) if first // 4 == second // 4 else 200.0

    monkeypatch.setattr(_host, "core_latency_ns", pair)
    return found


@pytest.mark.skipif(len(CPUS) < 2, reason="latency is between two CPUs")
def test_a_line_takes_nanoseconds() -> None:
    value = _host.core_latency_ns(CPUS[0], CPUS[1], 200, 3)
    assert 1 < value < 1_000_000
    assert set(os.sched_getaffinity(0)) == set(CPUS), "the caller stays where it was"


def test_numbers_that_cannot_be_are_named() -> None:
    with pytest.raises(ValueError, match="CPUs 0 and 0: expected two different ids"):
        _host.core_latency_ns(0, 0, 1, 1)
    with pytest.raises(ValueError, match="expected at least 1"):
        _host.core_latency_ns(0, 1, 0, 1)


def test_a_cpu_that_is_not_there_is_named() -> None:
    with pytest.raises(RuntimeError, match="CPU 1023 cannot be used"):
        _host.core_latency_ns(1023, CPUS[0], 1, 1)
    with pytest.raises(RuntimeError, match="CPU 1023 cannot be used"):
        _host.core_latency_ns(CPUS[0], 1023, 1, 1)


def test_cores_not_threads_are_measured(two_sockets: topology.Topology) -> None:
    assert core_latency.one_cpu_per_core(two_sockets) == list(range(8))


def test_nodes_are_summed_up(two_sockets: topology.Topology) -> None:
    cpus = core_latency.one_cpu_per_core(two_sockets)
    steps: list[tuple[int, int]] = []
    matrix = core_latency.measure(cpus, progress=lambda done, of: steps.append((done, of)))
    assert steps[-1] == (28, 28)
    assert matrix[2][6] == matrix[6][2] == 200
    assert matrix[3][3] is None
    assert core_latency.summarise(two_sockets, cpus, matrix) == [
        ((0, 0), 31, 31.5, 33),
        ((0, 1), 200, 200, 200),
        ((1, 1), 31, 31.5, 33),
    ]


def test_the_command_prints_and_draws(two_sockets: topology.Topology, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    picture = tmp_path / "map.png"
    result = CliRunner().invoke(main, ["topology", "--heat-map", str(picture)])
    assert result.exit_code == 0, result.output
    words = [line.split() for line in result.output.splitlines()]
    assert ["node", "0", "to", "node", "1", "200", "ns", "200", "ns", "200", "ns"] in words
    assert picture.read_bytes().startswith(SIGNATURE)
    data = json.loads(CliRunner().invoke(main, ["topology", "--latency", "--json"]).stdout)
    assert data["latency"]["nanoseconds"][0][4] == 200


def test_no_matplotlib_is_one_line(
    two_sockets: topology.Topology, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(main, ["topology", "--heat-map", str(tmp_path / "map.png")])
    assert result.exit_code == 1
    assert result.output == "Error: --heat-map needs matplotlib: pip install matplotlib\n"


def test_a_file_that_cannot_be_written_is_one_line(two_sockets: topology.Topology, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    result = CliRunner().invoke(main, ["topology", "--heat-map", str(tmp_path / "none/map.png")])
    assert result.exit_code == 1
    assert "No such file or directory" in result.output.splitlines()[-1]
