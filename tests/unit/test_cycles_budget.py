# SPDX-License-Identifier: Apache-2.0
"""The gate on modelled cycles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.neoverse.budget import BUDGET_FILE, find_excesses, find_orphans, read_budget, write_budget
from tests.unit.cycles_helpers import record

LABEL = "norm/rows/vllm_arm/neon"
BUDGET = {LABEL: {"V2": 1000}}


@pytest.mark.parametrize("cycles", [500, 1000, 1010, 1020])
def test_up_to_two_percent_pass(cycles: int) -> None:
    assert find_excesses([record(cycles=cycles)], BUDGET) == []


def test_three_percent_fail_by_name() -> None:
    assert find_excesses([record(cycles=1030), record(core="V2")], BUDGET) == [
        f"{LABEL} on V2: 1030 cycles, 3.0 % over 1000"
    ]


@pytest.mark.parametrize("changed", [{"core": "N1"}, {"case": "other"}, {"isa": "sve"}])
def test_what_has_no_budget_fails(changed: dict[str, str]) -> None:
    (problem,) = find_excesses([record(**changed)], BUDGET)
    assert "no budget" in problem


def test_a_budget_that_nothing_belongs_to_is_found() -> None:
    (problem,) = find_orphans([record()], {**BUDGET, "norm/gone/upstream": {"V1": 5}})
    assert problem.startswith("norm/gone/upstream on V1:")


def test_written_and_read_back_beside_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    write_budget(path, [record(cycles=7)], {"a/b/torch": {"N1": 1}, LABEL: {"N2": 2, "V2": 3}})
    assert read_budget(path) == {"a/b/torch": {"N1": 1}, LABEL: {"N2": 2, "V2": 7}}


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}'])
def test_what_is_no_budget_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "budget.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"budget\.json"):
        read_budget(path)


def test_the_projects_budget_covers_every_case_on_the_main_core() -> None:
    from benchmarks.neoverse.selection import choose

    budget = read_budget(BUDGET_FILE)
    labels = {f"{job.case.label}/{job.label}" for job in choose().jobs}
    assert labels == {label for label, cores in budget.items() if "V2" in cores}
    assert json.loads(BUDGET_FILE.read_text()) == budget
