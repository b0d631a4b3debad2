# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the model, with programs in LLVM's place whose answers are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import Work
from benchmarks.neoverse.assembly import Disassembler
from benchmarks.neoverse.cores import CORES
from benchmarks.neoverse.counts import Block
from benchmarks.neoverse.mca import ITERATIONS, Model
from benchmarks.neoverse.peaks import Peaks, find_peaks
from tests.unit.cycles_helpers import FAKE_LLVM_MC, FAKE_LLVM_MCA, write_program

V2 = CORES["V2"]
START_UP = 3 / ITERATIONS


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def model(tmp_path: Path, log: Path) -> Model:
    return make_model(tmp_path, log)


def make_model(tmp_path: Path, log: Path) -> Model:
    llvm_mc = write_program(tmp_path / "llvm-mc", FAKE_LLVM_MC)
    llvm_mca = write_program(tmp_path / "llvm-mca", f"LOG = {str(log)!r}\n{FAKE_LLVM_MCA}")
    return Model(llvm_mca, Disassembler(llvm_mc), tmp_path / "cycles.sqlite")


def test_cycles_are_executions_times_the_price_of_each_block(model: Model) -> None:
    region = [Block((2, 4), 100), Block((6,), 50)]
    assert model.cycles(region, V2) == pytest.approx(100 * (2 + START_UP) + 50 * (1 + START_UP))


def test_cold_blocks_are_taken_to_cost_what_the_rest_does(model: Model, log: Path) -> None:
    hot, cold = Block((2, 4), 990), Block((6,), 20)
    expected = 990 * (2 + START_UP) * 2000 / 1980
    assert model.cycles([hot, cold], V2) == pytest.approx(expected)


def test_words_that_are_no_instructions_cost_nothing(model: Model) -> None:
    assert model.cycles([Block((2, 3), 100)], V2) == pytest.approx(100 * (1 + START_UP))
    assert model.cycles([Block((3,), 100)], V2) == 0


def test_prices_are_kept_between_runs(tmp_path: Path, log: Path) -> None:
    region = [Block((2, 4), 100)]
    first = make_model(tmp_path, log).cycles(region, V2)
    assert make_model(tmp_path, log).cycles(region, V2) == first
    assert log.read_text() == "x", "the second run asked nothing"
    make_model(tmp_path, log).cycles(region, CORES["N2"])
    assert log.read_text() == "xx", "another core is another question"


def test_an_error_of_llvm_mca_is_passed_on(model: Model) -> None:
    with pytest.raises(RuntimeError, match="llvm-mca: error: bad instruction"):
        model.price([["bad"]], V2)


def test_peaks_follow_from_probes(model: Model) -> None:
    rate = 24 / (24 + START_UP)
    peaks = find_peaks(model, V2)
    assert (peaks.bf16, peaks.int8) == pytest.approx((16 * rate, 32 * rate))
    assert (peaks.loaded, peaks.stored) == pytest.approx((16 * rate, 16 * rate))
    without_matrices = find_peaks(model, CORES["N1"])
    assert (without_matrices.bf16, without_matrices.int8) == pytest.approx((4 * rate, 16 * rate))


@pytest.mark.parametrize(
    ("work", "cycles"),
    [
        (Work(480, 16, 6400), 100),
        (Work(480, 16, 12800, "int8"), 100),
        (Work(9600, 16, 6400), 200),
        (Work(480, 9600, 6400), 300),
    ],
)
def test_the_scarcest_resource_sets_the_peak(work: Work, cycles: float) -> None:
    assert Peaks(bf16=64, int8=128, loaded=48, stored=32).fewest_cycles(work) == cycles
