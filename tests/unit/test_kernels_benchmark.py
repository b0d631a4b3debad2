# SPDX-License-Identifier: Apache-2.0
"""The kernels benchmark: variants, timing in turns, its tables and the comparison with the model."""

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks import kernels
from benchmarks.cases import select
from benchmarks.timing import allocator, cases, modelled
from benchmarks.timing.cases import Timing, Variant
from vllm_arm import _host

NORM = "llama_decode_1"


def timing(name: str, isa: str | None, seconds: Sequence[float], error: float = 0.0) -> Timing:
    return Timing(Variant(name, isa), error, 0.1, list(seconds))


def test_ours_is_timed_in_each_variant_that_the_cpu_runs() -> None:
    (case,) = select("norm", NORM)
    features = _host.Features()
    operations = {"rms_norm": ["portable", "neon", "sve"]}
    assert [each.label for each in cases.variants(case, features, operations)] == [
        "vllm_arm/portable",
        "upstream",
        "torch",
    ]
    features.asimd_half = features.dot_product = True
    labels = [each.label for each in cases.variants(case, features, operations)]
    assert labels[:2] == ["vllm_arm/portable", "vllm_arm/neon"]
    assert "vllm_arm/sve" not in labels


def test_a_case_is_timed_and_checked() -> None:
    (case,) = select("norm", NORM)
    timings = cases.time_case(case, [Variant("vllm_arm", "portable"), Variant("torch", None)], 1, 2)
    for each in timings:
        assert each.failure is None
        assert len(each.seconds) == 2
        assert 0 < each.median < 1
        assert 0 < each.max_error <= each.tolerance
        assert not each.is_wrong


def test_what_cannot_run_gives_its_reason() -> None:
    (case,) = select("norm", NORM)
    lacking = next(isa for isa in ("neon", "sve") if _host.missing_features(isa, _host.host_features()))
    (refused,) = cases.time_case(case, [Variant("vllm_arm", lacking)], 1, 1)
    assert not refused.seconds
    assert f"VLLM_ARM_ISA={lacking}: this CPU lacks" in str(refused.failure)


@pytest.mark.parametrize(("error", "wrong"), [(0.1, False), (0.11, True), (math.nan, True), (math.inf, True)])
def test_wrong_results(error: float, wrong: bool) -> None:
    assert timing("torch", None, [1.0], error).is_wrong is wrong


def test_rows_and_table() -> None:
    (case,) = select("norm", NORM)
    failed = Timing(Variant("torch", None), failure="signal 4")
    timings = [timing("vllm_arm", "neon", [1e-6, 2e-6, 9e-6], 0.5), timing("upstream", None, [4e-6]), failed]
    ours, upstream, torch = kernels.case_rows(case, timings)
    assert (ours["impl"], ours["isa"], ours["seconds"], ours["speed_up"]) == ("vllm_arm", "neon", 2e-6, 2.0)
    assert ours["bytes_per_second"] == pytest.approx((case.work.bytes_read + case.work.bytes_written) / 2e-6)
    assert upstream["speed_up"] == 1.0
    assert (torch["seconds"], torch["failure"]) == (None, "signal 4")
    text = io.StringIO()
    Console(width=160, file=text).print(kernels.case_table(case, timings))
    for expected in ("vllm_arm/neon", "2.00x", "wrong", "signal 4"):
        assert expected in text.getvalue()


def row(impl: str, isa: str, core: str, cycles: float, case: str = "a") -> dict[str, Any]:
    return {"op": "norm", "case": case, "impl": impl, "isa": isa, "core": core, "cycles": cycles}


def test_modelled_and_measured_ratios() -> None:
    model = [
        row("upstream", "neon", "V1", 400),
        row("vllm_arm", "neon", "V1", 200),
        row("vllm_arm", "sve", "V1", 100),
        row("vllm_arm", "neon", "N1", 1),
        row("vllm_arm", "neon", "V1", 10, "unmatched"),
    ]
    measured = [
        {"op": "norm", "case": "a", "impl": "upstream", "isa": None, "seconds": 4.0},
        {"op": "norm", "case": "a", "impl": "vllm_arm", "isa": "neon", "seconds": 1.7},
        {"op": "norm", "case": "a", "impl": "vllm_arm", "isa": "sve", "seconds": 2.0},
    ]
    neon, sve = modelled.compare(model, measured, "V1")
    assert (neon.impl, neon.modelled, neon.agrees) == ("vllm_arm/neon", 2.0, True)
    assert neon.measured == pytest.approx(4 / 1.7)
    assert (sve.impl, sve.modelled, sve.measured, sve.agrees) == ("vllm_arm/sve", 4.0, 2.0, False)
    assert modelled.compare(model, measured, "N2") == []


def test_modelled_cycles_are_read(tmp_path: Path) -> None:
    path = tmp_path / "cycles.json"
    assert modelled.read(path) == []
    path.write_text(json.dumps([row("torch", "neon", "V1", 1)]))
    assert len(modelled.read(path)) == 1
    path.write_text("{}")
    with pytest.raises(ValueError, match="expected a list of objects with 'cycles'"):
        modelled.read(path)


def test_the_allocators_speed_up_is_of_pairs() -> None:
    def process(cpu_seconds: float, *seconds: float) -> dict[str, Any]:
        return {"seconds": seconds, "user_seconds": cpu_seconds - 1, "system_seconds": 1, "page_faults": 1}

    comparison = allocator.Comparison(
        {
            "glibc": [process(3, 2, 9, 2), process(30, 8, 8, 8), process(6, 3, 3, 3)],
            "mimalloc": [process(2, 1, 1, 9), process(10, 4, 4, 4), process(6, 3, 3, 3)],
        }
    )
    assert comparison.speed_up() == 1.5
    assert comparison.wall_speed_up() == 2
    assert comparison.fastest("glibc") == 2
    assert comparison.median("glibc") == 3
    assert comparison.cpu_seconds("glibc") == 6


def test_the_allocators_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert "LD_PRELOAD" not in allocator.environment("glibc")
    assert "libmimalloc" in allocator.environment("mimalloc")["LD_PRELOAD"]
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    with pytest.raises(allocator.AllocatorError, match="already names an allocator, /usr"):
        allocator.environment("glibc")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "sorting"], "expected one of"),
        (["--op", "norm", "--case", "none"], "expected one of"),
        (["--op", "all_reduce"], "its cases are counted only"),
        (["--op", "allocator", "--case", "none"], f"expected {allocator.CASE}"),
        (["--threads", "4096"], "--threads: expected at most"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(kernels.main, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
