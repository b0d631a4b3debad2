# SPDX-License-Identifier: Apache-2.0
"""What the modelled cycles' report shows and writes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.neoverse.measure import Failure, Results
from benchmarks.neoverse.report import read_json, show, write_json
from tests.unit.cycles_helpers import record

RECORDS = [
    record(core="N1", cycles=2222, bound="compute"),
    record(),
    record(impl="upstream", isa="", cycles=1250, ratio_to_upstream=1.0, max_error=0.5, correct=False),
]


def shown(results: Results) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(results, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_one_line_an_implementation_with_every_core() -> None:
    text = shown(Results(RECORDS, []))
    (ours,) = (line for line in text.splitlines() if "vllm_arm/neon" in line)
    assert [cell.strip() for cell in ours.split("│")[1:-1]] == [
        *("norm/rows", "vllm_arm/neon", "5,000", "2,222", "1,000"),
        *("-", "4.00", "50", "0.80", "1.5", "memory", "1.0e-03"),
    ]
    (upstream,) = (line for line in text.splitlines() if " upstream " in line and "1,250" in line)
    assert "5.0e-01 WRONG" in upstream
    assert "wrong result: norm/rows/upstream on V2" in text


def test_the_limits_stand_below_the_figures() -> None:
    text = " ".join(shown(Results(RECORDS, [])).split())
    for limit in ("Modelled, not measured", "hits the L1 cache", "every branch is predicted", "1.73 bytes a cycle"):
        assert limit in text


def test_what_gave_no_figure_is_said() -> None:
    failures = [Failure(f"attention/{case}/upstream", "N1", "Illegal instruction") for case in ("mixed", "decode_2k")]
    text = shown(Results([], failures))
    assert "no figure on N1, Illegal instruction: attention/mixed/upstream, attention/decode_2k/upstream" in text


def test_json_has_the_documented_fields_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cycles.json"
    write_json(RECORDS, path)
    fields = {"op", "case", "impl", "isa", "core", "instructions", "cycles", "peak_fraction"}
    fields |= {"ratio_to_upstream", "max_error"}
    assert all(fields <= entry.keys() for entry in json.loads(path.read_text()))
    assert read_json(path) == RECORDS


def test_another_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cycles.json"
    path.write_text('[{"op": "norm"}]')
    with pytest.raises(ValueError, match=r"cycles\.json"):
        read_json(path)


def test_the_chart_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of requirements/bench.txt, is not installed")
    from benchmarks.neoverse.chart import draw

    path = tmp_path / "new" / "cycles.png"
    draw(RECORDS, path)
    assert path.read_bytes().startswith(b"\x89PNG")
