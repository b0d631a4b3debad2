# SPDX-License-Identifier: Apache-2.0
"""vllm-arm topology."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.unit.topologies import MACHINES, lay
from vllm_arm.cli.main import main
from vllm_arm.runtime import topology


@pytest.fixture(autouse=True)
def altra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine of two sockets with 128 cores each."""
    machine = MACHINES["altra_max_two_sockets"]
    lay(tmp_path, machine)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    read = topology.read_topology(tmp_path, frozenset(machine.cpu_ids))
    monkeypatch.setattr(topology, "read_topology", lambda: read)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["topology", *arguments])


def test_nodes_and_plan_are_printed() -> None:
    result = run("--tp", "2")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert any(line.split()[:4] == ["0", "0", "128", "0-127"] and "256.0 GiB" in line for line in lines)
    assert any(line.split()[:4] == ["1", "1", "128", "128-255"] for line in lines)
    assert any(line.split() == ["worker", "0", "0-126", "0", "0"] for line in lines)
    assert any(line.split() == ["worker", "1", "128-254", "1", "1"] for line in lines)
    assert any(line.split()[-2:] == ["127,255", "0-1"] for line in lines)


def test_json_holds_the_same() -> None:
    data = json.loads(run("--tp", "2", "--pp", "2", "--json").output)
    assert [node["cores"] for node in data["nodes"]] == [128, 128]
    assert [rank["nodes"] for rank in data["ranks"]] == [[0], [0], [1], [1]]
    bound = {cpu for rank in data["ranks"] for cpu in rank["cpus"]}
    assert bound.isdisjoint(data["engine_cpus"])
    assert data["engine_cpus"]
    assert data["nodes"][0]["distances"] == [10, 20]


def test_replicas_are_one_a_node() -> None:
    data = json.loads(run("--dp", "2", "--json").output)
    assert [rank["memory_nodes"] for rank in data["ranks"]] == [[0], [1]]


def test_too_many_ranks_are_one_line() -> None:
    result = run("--tp", "512")
    assert result.exit_code == 1
    assert result.output.startswith("Error: 512 ranks need at least one CPU each")
