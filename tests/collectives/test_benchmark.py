# SPDX-License-Identifier: Apache-2.0
"""The benchmark of collectives: rows, table and plot of a short run."""

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks import collectives


def test_a_short_run_gives_every_implementation_a_row(tmp_path: Path) -> None:
    output, plot = tmp_path / "rows.json", tmp_path / "plot.png"
    arguments = ["--size", "64", "--size", "65536", "--rounds", "1", "--iterations", "10", "--op", "all_gather"]
    result = CliRunner().invoke(collectives.main, [*arguments, "--json", str(output), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    rows = json.loads(output.read_text())["results"]
    assert {(row["op"], row["dtype"], row["bytes"], row["ranks"]) for row in rows} == {
        ("all_gather", "bfloat16", size, 2) for size in (64, 65536)
    }
    assert {"ours", "gloo"} <= {row["impl"] for row in rows}
    for row in rows:
        assert 0 < row["p50_us"] <= row["p90_us"] <= row["p99_us"]
    assert plot.stat().st_size > 0
    assert "all_gather, bfloat16, 2 ranks" in result.output
