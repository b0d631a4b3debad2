# SPDX-License-Identifier: Apache-2.0
"""The command line of the modelled cycles: what it refuses, and what it writes without a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.neoverse import __main__ as command_line
from benchmarks.neoverse.budget import read_budget
from benchmarks.neoverse.measure import Record, Results
from benchmarks.neoverse.report import write_json
from tests.unit.cycles_helpers import record

LABEL = "norm/rows/vllm_arm/neon"


def call(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(command_line.main, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--op", "nrom"], "cycles: op 'nrom': expected one of"),
        (["--subset", "short", "--op", "norm"], "cycles: --subset: cannot be combined with"),
        (["--budget", "/nowhere.json"], "cycles: /nowhere.json:"),
        (["--core", "V9"], "'V9' is not one of 'N1', 'V1', 'N2', 'V2'"),
    ],
)
def test_a_bad_option_is_one_line(options: list[str], message: str) -> None:
    code, output = call("check", *options)
    assert code == 2
    assert message in output


def test_the_wheel_is_asked_for_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "find_tools", lambda: None)
    monkeypatch.setattr(command_line, "make_root", lambda: pytest.fail("too late"))
    with pytest.raises(ValueError, match="--wheel"):
        command_line.count_and_model([command_line.choose("norm")], wheel=None)


@pytest.mark.parametrize(
    ("found", "code", "line"),
    [
        (record(cycles=1010), 0, "1 figures, 0 problems"),
        (record(cycles=1030), 1, f"{LABEL} on V2: 1030 cycles, 3.0 % over 1000"),
        (record(correct=False), 1, f"{LABEL} on V2: wrong result"),
        (record(case="new"), 1, "norm/new/vllm_arm/neon on V2: no budget"),
    ],
)
def test_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Record, code: int, line: str) -> None:
    monkeypatch.setattr(command_line, "count_and_model", lambda *_: Results([found], []))
    budget = tmp_path / "budget.json"
    budget.write_text(f'{{"{LABEL}": {{"V2": 1000, "N2": 1}}}}')
    narrow = ["check", "--op", "norm", "--budget", budget]
    assert call(*narrow)[0] == code
    assert line in call(*narrow)[1]
    complete_code, complete_output = call("check", "--budget", budget)
    assert complete_code == 1
    assert f"{LABEL} on N2: has a budget but was not measured" in complete_output


def test_a_budget_is_taken_from_a_run(tmp_path: Path) -> None:
    run, budget = tmp_path / "cycles.json", tmp_path / "budget.json"
    budget.write_text('{"norm/gone/upstream": {"V1": 5}}')
    write_json([record()], run)
    assert call("update-budget", "--op", "norm", "--from", run, "--budget", budget)[0] == 0
    assert read_budget(budget) == {LABEL: {"V2": 1000}, "norm/gone/upstream": {"V1": 5}}
    assert call("update-budget", "--from", run, "--budget", budget)[0] == 0
    assert read_budget(budget) == {LABEL: {"V2": 1000}}, "a complete one drops what nothing belongs to"


def test_no_budget_is_made_of_wrong_results(tmp_path: Path) -> None:
    run, budget = tmp_path / "cycles.json", tmp_path / "budget.json"
    write_json([record(correct=False)], run)
    code, output = call("update-budget", "--from", run, "--budget", budget)
    assert code == 2
    assert LABEL in output
    assert not budget.exists()
