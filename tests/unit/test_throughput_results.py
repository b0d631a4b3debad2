# SPDX-License-Identifier: Apache-2.0
"""Runs of the throughput benchmark: their order, resuming, statistics, tables and plots."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.serving import report
from benchmarks.serving.child import ChildError
from benchmarks.serving.session import run_all, schedule
from benchmarks.serving.steps import Step
from benchmarks.serving.store import Store, write_atomically
from benchmarks.serving.summary import Spread, summarise

STEPS = [Step("stock", "stock", ()), Step("fast", "+ fast", ("A",)), Step("faster", "+ faster", ("B",))]
TITLES = {step.name: step.title for step in STEPS}


def figures(seconds: float, faults: int = 10) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "requests": 4,
        "prompt_tokens": 80,
        "output_tokens": 20,
        "worker_page_faults": faults,
        "worker_user_seconds": 1.5,
        "worker_system_seconds": 0.5,
        "worker_peak_bytes": 2**30,
    }


def store(directory: Path, **workload: Any) -> Store:
    return Store(directory, "model", workload, {"cpu": "c"})


def test_rounds_take_turns_and_change_direction() -> None:
    order = [(number, step.name) for number, step in schedule(STEPS[:2], 3)]
    assert order == [(0, "stock"), (0, "fast"), (1, "fast"), (1, "stock"), (2, "stock"), (2, "fast")]


def test_a_stopped_benchmark_goes_on_where_it_was(tmp_path: Path) -> None:
    done: list[str] = []

    def run(step: Step) -> dict[str, Any]:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(step.name)
        return figures(1.0)

    with pytest.raises(KeyboardInterrupt):
        run_all(STEPS, 2, store(tmp_path), run)
    rest: list[str] = []
    run_all(STEPS, 2, store(tmp_path), lambda step: rest.append(step.name) or figures(2.0))
    assert done + rest == [step.name for _, step in schedule(STEPS, 2)]
    assert [run["seconds"] for run in store(tmp_path).runs] == [1.0] * 3 + [2.0] * 3
    run_all(STEPS, 2, store(tmp_path), lambda step: pytest.fail("nothing was left to do"))


def test_another_workload_or_host_has_another_file(tmp_path: Path) -> None:
    first = store(tmp_path, tokens=1)
    first.add("stock", 0, figures(1.0))
    assert not store(tmp_path, tokens=2).runs
    assert not Store(tmp_path, "model", {"tokens": 1}, {"cpu": "d"}).runs
    assert store(tmp_path, tokens=1).has("stock", 0)


def test_a_failed_run_is_kept_and_tried_again_by_the_next_call(tmp_path: Path) -> None:
    calls: list[str] = []

    def run(step: Step) -> dict[str, Any]:
        calls.append(step.name)
        if step.name == "fast":
            raise ChildError("signal 4: illegal instruction")
        return figures(1.0)

    run_all(STEPS[:2], 2, store(tmp_path), run)
    assert calls == ["stock", "fast", "stock"]
    assert not store(tmp_path).has("fast", 0)
    summaries = summarise(store(tmp_path).runs, ["stock", "fast"])
    assert summaries[1].error == "signal 4: illegal instruction"
    run_all(STEPS[:2], 2, store(tmp_path), lambda step: figures(1.0))
    assert store(tmp_path).has("fast", 0)
    assert len(store(tmp_path).runs) == 4


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_atomically(path, {"old": 1})
    with pytest.raises(TypeError):
        write_atomically(path, {"new": object()})
    assert json.loads(path.read_text()) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_medians_spread_and_speed_ups() -> None:
    assert Spread.of([1.0, 4.0, 2.0]) == Spread(2.0, 1.0, 4.0)
    assert Spread(2.0, 1.0, 4.0).percent == 75
    # The machine gets slower and slower: within each round "fast" is twice as fast, once more than that.
    runs = [
        {"step": name, "round": number, **figures(seconds)}
        for number, (slow, fast) in enumerate([(2.0, 1.0), (4.0, 1.0), (8.0, 4.0)])
        for name, seconds in (("stock", slow), ("fast", fast))
    ]
    stock_summary, fast_summary = summarise(runs, ["stock", "fast"])
    assert stock_summary.tokens_per_second == Spread(25, 12.5, 50)
    assert fast_summary.tokens_per_second == Spread(100, 25, 100)
    assert (fast_summary.rounds, fast_summary.over_previous, fast_summary.over_start) == (3, 2.0, 2.0)
    assert (fast_summary.requests_per_second, fast_summary.output_tokens_per_second) == (4.0, 20.0)


def test_a_missing_step_is_passed_over() -> None:
    runs = [{"step": "stock", "round": 0, **figures(2.0)}, {"step": "faster", "round": 0, **figures(1.0)}]
    _, fast, faster = summarise(runs, ["stock", "fast", "faster"])
    assert (fast.error, fast.tokens_per_second) == ("not run", None)
    assert (faster.over_previous, faster.over_start) == (2.0, 2.0)


def example() -> list[Any]:
    runs = [
        {"step": "stock", "round": 0, **figures(2.0, 1_234_567)},
        {"step": "fast", "round": 0, "error": "exit code 1: no"},
        {"step": "faster", "round": 0, **figures(1.0)},
    ]
    return summarise(runs, [step.name for step in STEPS])


def test_the_table_shows_figures_and_failures() -> None:
    text = io.StringIO()
    Console(width=200, file=text).print(report.throughput_table("title", example(), TITLES))
    for expected in ("50.0", "100.0", "2.00x", "2.00", "1,234,567", "1.00 GiB", "exit code 1: no"):
        assert expected in text.getvalue()


def test_the_waterfall_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    path = tmp_path / "plots" / "waterfall.png"
    report.plot_waterfall(path, "title", "host", example(), TITLES)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no run succeeded"):
        report.plot_waterfall(path, "title", "host", summarise([], ["stock"]), TITLES)
