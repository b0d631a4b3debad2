# SPDX-License-Identifier: Apache-2.0
"""The targets in modelled cycles."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.cases import CASES
from benchmarks.neoverse.__main__ import main
from benchmarks.neoverse.measure import Record
from benchmarks.neoverse.report import write_json
from benchmarks.neoverse.targets import Verdict, judge
from tests.unit.cycles_helpers import record


def attention(case: str, core: str = "V2", **changes: object) -> Record:
    return record(op="attention", case=case, core=core, **changes)


def verdict_on(records: list[Record], case: str, core: str = "V2") -> Verdict:
    (verdict,) = (each for each in judge(records) if (each.case, each.core) == (f"attention/{case}", core))
    return verdict


def test_targets_are_about_cases_that_exist() -> None:
    assert {each.case for each in judge([])} <= {case.label for case in CASES}
    assert all(each.is_met is None for each in judge([]))


@pytest.mark.parametrize(("ratio", "met"), [(0.5, True), (0.51, False), (None, None)])
def test_the_best_variant_is_held_against_upstream(ratio: float | None, met: bool | None) -> None:
    slow = attention("prefill_512", isa="neon", cycles=9000, ratio_to_upstream=3.0)
    fast = attention("prefill_512", isa="bf16", cycles=700, ratio_to_upstream=ratio)
    upstream = attention("prefill_512", impl="upstream", isa="", cycles=1, ratio_to_upstream=1.0)
    verdict = verdict_on([slow, fast, upstream], "prefill_512")
    assert (verdict.isa, verdict.value, verdict.is_met) == ("bf16", ratio, met)


@pytest.mark.parametrize(("cycles", "met"), [(1300, True), (1301, False)])
def test_a_quantised_cache_is_held_against_bf16(cycles: int, met: bool) -> None:
    records = [attention("decode_2k"), attention("decode_2k_int8", cycles=cycles)]
    assert verdict_on(records, "decode_2k_int8").is_met is met
    assert verdict_on(records, "decode_2k_fp8").is_met is None


@pytest.mark.parametrize(("share", "met"), [(0.6, True), (0.59, False)])
def test_n1_is_held_against_its_peak(share: float, met: bool) -> None:
    records = [attention("prefill_512", "N1", peak_fraction=share, ratio_to_upstream=None)]
    assert verdict_on(records, "prefill_512", "N1").is_met is met


def test_the_command_fails_where_one_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "cycles.json"
    write_json([attention("decode_d64", ratio_to_upstream=0.6)], path)
    done = CliRunner().invoke(main, ["targets", "--from", str(path)])
    assert done.exit_code == 0, done.output
    assert "0.60" in done.output
    write_json([attention("decode_d64", ratio_to_upstream=0.7)], path)
    done = CliRunner().invoke(main, ["targets", "--from", str(path)])
    assert done.exit_code == 1
    assert "missed" in done.output
