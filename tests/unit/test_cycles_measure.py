# SPDX-License-Identifier: Apache-2.0
"""Which job is counted on which core, and what becomes of the counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.cases import Call, Case, Implementation, Work
from benchmarks.neoverse.assembly import Disassembler
from benchmarks.neoverse.cores import CORES, Core
from benchmarks.neoverse.counts import Block
from benchmarks.neoverse.mca import Model
from benchmarks.neoverse.measure import Results, count, model
from benchmarks.neoverse.runner import Job, Outcome
from benchmarks.neoverse.selection import Selection, choose, jobs_of, kernel_variants, short_selections
from tests.unit.cycles_helpers import FAKE_LLVM_MC, FAKE_LLVM_MCA, write_program

PLAIN, SVE = 2, 4


def prepare(inputs: object) -> Call:
    raise AssertionError("nothing is run here")


IMPLEMENTATIONS = (
    Implementation("vllm_arm", prepare, operation="square"),
    Implementation("upstream", prepare),
    Implementation("torch", prepare, tolerance=0.5),
)
CASE = Case("square", "small", "4 x 4", Work(1000, 500, 64), 0.01, prepare, prepare, IMPLEMENTATIONS)  # type: ignore[arg-type]
OURS = {isa: Job(CASE, IMPLEMENTATIONS[0], isa) for isa in ("neon", "sve")}
UPSTREAM, TORCH = (Job(CASE, implementation, None) for implementation in IMPLEMENTATIONS[1:])
EVERY_JOB = (*OURS.values(), UPSTREAM, TORCH)


class Silent:
    """No progress is shown."""

    def phase(self, title: str, total: int) -> None: ...

    def advance(self, steps: int = 1) -> None: ...


class Emulator:
    """Answers with 100 executions and one for each bit of the core's vector, upstream with twice as many."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def run(
        self, work: Mapping[Core, Sequence[Job]], finished: Callable[[Job], None]
    ) -> dict[tuple[Core, Job], Outcome]:
        self.asked += [(core.name, job.label) for core, jobs in work.items() for job in jobs]
        return {(core, job): self.outcome(core, job) for core, jobs in work.items() for job in jobs}

    def outcome(self, core: Core, job: Job) -> Outcome:
        if (core.name, job) == ("N1", UPSTREAM):
            return Outcome(failure="SIGILL")
        word = SVE if job.isa == "sve" else PLAIN
        executions = (100 + core.vector_bits) * (2 if job == UPSTREAM else 1)
        return Outcome((Block((word,), executions),), max_error=0.02)


@pytest.fixture
def disassembler(tmp_path: Path) -> Disassembler:
    source = FAKE_LLVM_MC.replace('f"\\tnop\\t#{word} // a comment"', '"incb x0" if word == 4 else "nop"')
    return Disassembler(write_program(tmp_path / "llvm-mc", source))


def test_others_run_on_each_core_and_ours_where_the_count_may_differ(disassembler: Disassembler) -> None:
    emulator = Emulator()
    outcomes = count(Selection(EVERY_JOB, tuple(CORES.values())), emulator, disassembler, Silent())
    foreign = {(core, job) for core in CORES for job in ("upstream", "torch")}
    ours = {("V2", "vllm_arm/neon"), ("V2", "vllm_arm/sve"), ("N1", "vllm_arm/neon"), ("V1", "vllm_arm/sve")}
    assert set(emulator.asked) == foreign | ours
    assert len(emulator.asked) == len(foreign | ours), "none twice"
    executions = {(core.name, job.label): outcome.blocks for (core, job), outcome in outcomes.items() if job.isa}
    assert executions.keys() == {(core, f"vllm_arm/{isa}") for core in CORES for isa in OURS} - {("N1", "vllm_arm/sve")}
    assert executions["V1", "vllm_arm/sve"][0].executions == 356, "at 256 bit"
    assert executions["N2", "vllm_arm/sve"] == executions["V2", "vllm_arm/sve"], "at 128 bit both"
    assert executions["V1", "vllm_arm/neon"] == executions["V2", "vllm_arm/neon"]


def test_a_core_that_was_not_asked_for_gives_no_figure(disassembler: Disassembler) -> None:
    outcomes = count(Selection((OURS["neon"],), (CORES["N2"],)), Emulator(), disassembler, Silent())
    assert [core.name for core, _ in outcomes] == ["N2"]


@pytest.fixture
def results(tmp_path: Path, disassembler: Disassembler) -> Results:
    llvm_mca = write_program(tmp_path / "llvm-mca", f"LOG = {str(tmp_path / 'log')!r}\n{FAKE_LLVM_MCA}")
    models = Model(llvm_mca, disassembler, tmp_path / "cycles.sqlite")
    selection = Selection(EVERY_JOB, (CORES["N1"], CORES["V1"]))
    return model(count(selection, Emulator(), disassembler, Silent()), models, Silent())


def test_figures_stand_beside_upstreams(results: Results) -> None:
    by_name = {(record.impl + record.isa, record.core): record for record in results.records}
    sve = by_name["vllm_armsve", "V1"]
    assert sve.instructions == 356
    assert sve.cycles == round(356 * 1.015)
    assert sve.ratio_to_upstream == 0.5, "below 1 is faster"
    assert sve.bytes_per_cycle == pytest.approx(1500 / sve.cycles, rel=0.01)
    assert sve.bound == "memory", "more than 1.73 bytes a cycle"
    assert sve.peak_fraction == pytest.approx(63 / 361, rel=0.01), "1000 bytes at 16 a cycle"
    assert by_name["torch", "N1"].ratio_to_upstream is None, "there is no upstream on this core"
    assert by_name["vllm_armneon", "N1"].cycles == round(100 * 1.015)


def test_results_are_judged_by_the_implementations_tolerance(results: Results) -> None:
    assert {record.impl: record.correct for record in results.records} == {
        "vllm_arm": False,
        "upstream": False,
        "torch": True,
    }


def test_failures_are_kept_apart(results: Results) -> None:
    ((label, core, reason),) = ((each.label, each.core, each.reason) for each in results.failures)
    assert (label, core, reason) == ("square/small/upstream", "N1", "SIGILL")


def test_variants_come_from_the_builds_list(tmp_path: Path) -> None:
    assert kernel_variants()["rms_norm"][:2] == ("portable", "neon")
    table = tmp_path / "operations.cmake"
    table.write_text("# vllm_arm_operation(NAME FOLDER VARIANTS...)\nvllm_arm_operation(square maths portable sve)\n")
    variants = kernel_variants(table)
    assert variants == {"square": ("portable", "sve")}
    labels = [job.label for job in jobs_of([CASE], variants)]
    assert labels == ["vllm_arm/portable", "vllm_arm/sve", "upstream", "torch"]
    table.write_text("")
    with pytest.raises(ValueError, match="found"):
        kernel_variants(table)


def test_options_narrow_the_selection() -> None:
    selection = choose("norm", "llama_decode_1", "vllm_arm", ["V1"])
    assert [job.label for job in selection.jobs] == ["vllm_arm/portable", "vllm_arm/neon", "vllm_arm/bf16"]
    assert [core.name for core in selection.cores] == ["V1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": "nrom"}, "expected one of activation, all_reduce"),
        ({"op": "norm", "case": "decode_2k"}, "expected one of llama_decode_1"),
        ({"op": "rope", "implementation": "vllm_arm"}, "expected one of torch, upstream"),
    ],
)
def test_an_option_that_fits_nothing_says_what_there_is(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(**options)  # type: ignore[arg-type]


def test_the_short_subset_has_our_norm_kernels_and_a_case_of_attention() -> None:
    jobs = [(job.case.op, job.implementation.name) for selection in short_selections() for job in selection.jobs]
    assert set(jobs) == {("norm", "vllm_arm"), ("attention", "vllm_arm"), ("attention", "upstream")}
