# SPDX-License-Identifier: Apache-2.0
"""Modelled cycles on the emulated server: they repeat, and the gate sees a kernel that became slower."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.neoverse.budget import write_budget
from benchmarks.neoverse.chart import require_matplotlib
from benchmarks.neoverse.report import read_json
from benchmarks.neoverse.tools import find_tools
from tests.emulation.conftest import REPOSITORY, give_up
from tests.emulation.guest import ArmRoot

CASE = ["--op", "norm", "--case", "gpt_oss_prefill_64"]
NEON = "norm/gpt_oss_prefill_64/vllm_arm/neon"
PORTABLE = "norm/gpt_oss_prefill_64/vllm_arm/portable"


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    """What the command needs beyond the rig."""
    try:
        find_tools()
        require_matplotlib()
    except LookupError as error:
        give_up(str(error))


def cycles(command: str, *options: str | Path) -> subprocess.CompletedProcess[str]:
    """`python -m benchmarks.neoverse` as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.neoverse", command, *CASE, *map(str, options)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


@pytest.fixture(scope="module")
def runs(arm_root: ArmRoot, arm_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The JSON files of two equal runs."""
    folder = tmp_path_factory.mktemp("cycles")
    files = [folder / f"{number}.json" for number in (1, 2)]
    for file in files:
        options = ["--impl", "vllm_arm/neon", "--core", "V2", "--wheel", arm_wheel]
        done = cycles("run", *options, "--json", file, "--chart", folder / "chart.png")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Modelled, not measured" in done.stdout
        assert (folder / "chart.png").read_bytes().startswith(b"\x89PNG")
    return files


def test_two_runs_agree(runs: list[Path]) -> None:
    (first,), (second,) = map(read_json, runs)
    assert first.label == second.label == NEON
    assert first.instructions == pytest.approx(second.instructions, rel=0.005)
    assert first.cycles == pytest.approx(second.cycles, rel=0.005)


def test_the_figures_are_plausible(runs: list[Path]) -> None:
    (ours,) = read_json(runs[0])
    assert ours.correct
    assert ours.required_bytes == 2 * (64 * 2880 * 2) + 2 * 2880
    # Each row is read twice, for the mean and for the products.
    assert ours.required_bytes < ours.accessed_bytes < 4 * ours.required_bytes
    assert 0.01 < ours.peak_fraction < 1
    assert ours.instructions / 16 < ours.cycles < 2 * ours.instructions


def test_the_gate_passes_what_fits(runs: list[Path], arm_wheel: Path, tmp_path: Path) -> None:
    budget = tmp_path / "budget.json"
    write_budget(budget, read_json(runs[0]), {})
    done = cycles("check", "--impl", "vllm_arm/neon", "--core", "V2", "--wheel", arm_wheel, "--budget", budget)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_gate_names_a_kernel_that_became_slower(runs: list[Path], arm_wheel: Path, tmp_path: Path) -> None:
    (neon,) = read_json(runs[0])
    budget = tmp_path / "budget.json"
    # The portable kernel is held to the vectorised one's budget.
    budget.write_text(json.dumps({PORTABLE: {"V2": neon.cycles}}))
    done = cycles("check", "--impl", "vllm_arm/portable", "--core", "V2", "--wheel", arm_wheel, "--budget", budget)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{PORTABLE} on V2:" in done.stdout
    assert f"% over {neon.cycles}" in done.stdout
