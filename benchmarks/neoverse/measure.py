# SPDX-License-Identifier: Apache-2.0
"""From jobs to figures: count, reuse counts where that is right, price them in each core's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from benchmarks.neoverse.assembly import Disassembler, is_sve
from benchmarks.neoverse.cores import MAIN_CORE, MEMORY_BYTES_PER_CYCLE, Core
from benchmarks.neoverse.counts import Block, total_instructions
from benchmarks.neoverse.mca import Model
from benchmarks.neoverse.peaks import Peaks, find_peaks
from benchmarks.neoverse.runner import Job, Outcome
from benchmarks.neoverse.selection import Selection
from benchmarks.neoverse.widths import access

# The C library's string functions are SVE where the core has it; so few of them do not ask for another count.
STRAY_SVE = 0.01


@dataclass(frozen=True)
class Record:
    """One implementation of one case on one core, modelled.

    ``isa`` is our variant, empty for others. ``peak_fraction`` is the cycles below which the core's model cannot do
    the op's work over ``cycles``. ``ratio_to_upstream`` is ``cycles`` over upstream's, None without an upstream.
    ``required_bytes`` must be moved, ``accessed_bytes`` are counted loads and stores. ``bytes_per_cycle`` is
    ``required_bytes`` over ``cycles``, and ``bound`` says whether memory could deliver that to every core at once.
    ``max_error`` is relative to the largest element of the float64 reference and ``correct`` whether it is tolerated.
    """

    op: str
    case: str
    impl: str
    isa: str
    core: str
    instructions: int
    cycles: int
    peak_fraction: float
    ratio_to_upstream: float | None
    max_error: float
    correct: bool
    multiply_accumulates_per_cycle: float
    required_bytes: int
    accessed_bytes: int
    bytes_per_cycle: float
    bound: str

    @property
    def label(self) -> str:
        """``norm/llama_decode_1/vllm_arm/neon``."""
        return "/".join(filter(None, (self.op, self.case, self.impl, self.isa)))

    def as_json(self) -> dict[str, Any]:
        """The record as it stands in cycles.json."""
        return asdict(self)


@dataclass(frozen=True)
class Failure:
    """A job that gave no figure on a core, and why."""

    label: str
    core: str
    reason: str


@dataclass(frozen=True)
class Results:
    """What a run found."""

    records: list[Record]
    failures: list[Failure]


class Counter(Protocol):
    """What counts jobs: a Runner, or a stand-in for tests."""

    def run(
        self, work: Mapping[Core, Sequence[Job]], finished: Callable[[Job], None]
    ) -> dict[tuple[Core, Job], Outcome]:
        """Count each job as the core of its list."""


class Progress(Protocol):
    """Where the state of a long run is shown."""

    def phase(self, title: str, total: int) -> None:
        """A phase of ``total`` steps begins."""

    def advance(self, steps: int = 1) -> None:
        """Some steps of the phase are done."""


def count(
    selection: Selection, counter: Counter, disassembler: Disassembler, progress: Progress
) -> dict[tuple[Core, Job], Outcome]:
    """The outcome of each job on each core of the selection.

    Code that is not ours chooses kernels by the CPU that it finds, so it runs on each core. A variant of ours is
    counted once with SVE and once without, and again at another vector length if it is written in SVE.
    """
    ours = [job for job in selection.jobs if job.isa]
    others = [job for job in selection.jobs if not job.isa]
    work = {core: list(others) for core in selection.cores}
    main = work.setdefault(MAIN_CORE, [])
    main += ours
    for core in selection.cores:
        if not core.vector_bits:
            work[core] += [job for job in ours if job.isa in core.isas]
    progress.phase("counting", sum(map(len, work.values())))
    counted = counter.run(work, lambda _: progress.advance())
    again: dict[Core, list[Job]] = {}
    for core in selection.cores:
        for job in ours if core.vector_bits else ():
            outcome = counted[MAIN_CORE, job]
            if core.vector_bits != MAIN_CORE.vector_bits and sve_share(outcome.blocks, disassembler) > STRAY_SVE:
                again.setdefault(core, []).append(job)
            counted.setdefault((core, job), outcome)
    if again:
        progress.phase("counting at other vector lengths", sum(map(len, again.values())))
        counted.update(counter.run(again, lambda _: progress.advance()))
    return {(core, job): outcome for (core, job), outcome in counted.items() if core in selection.cores}


def sve_share(blocks: Iterable[Block], disassembler: Disassembler) -> float:
    """The share of executed instructions that depend on the vector length."""
    blocks = list(blocks)
    disassembler.learn(word for block in blocks for word in block.words)
    sve = total = 0
    for block in blocks:
        texts = map(disassembler.text, block.words)
        sve += block.executions * sum(text is not None and is_sve(text) for text in texts)
        total += block.instructions
    return sve / total if total else 0.0


def accessed_bytes(blocks: Iterable[Block], core: Core, disassembler: Disassembler) -> int:
    """Bytes that the executed instructions load and store."""
    total = 0
    for block in blocks:
        for word in block.words:
            text = disassembler.text(word)
            moved = access(text, core.vector_bits) if text else None
            if moved:
                total += block.executions * (moved.loaded + moved.stored)
    return total


def model(outcomes: dict[tuple[Core, Job], Outcome], models: Model, progress: Progress) -> Results:
    """Price the outcomes and set them beside upstream's."""
    records: list[Record] = []
    failures: list[Failure] = []
    by_core: dict[Core, list[tuple[Job, Outcome]]] = {}
    for (core, job), outcome in outcomes.items():
        by_core.setdefault(core, []).append((job, outcome))
    for core, pairs in by_core.items():
        regions = [outcome.blocks for _, outcome in pairs if outcome.failure is None]
        models.disassembler.learn(word for blocks in regions for block in blocks for word in block.words)
        _learn(models, core, regions, progress)
        peaks = find_peaks(models, core)
        cycles = {job: models.cycles(outcome.blocks, core) for job, outcome in pairs if outcome.failure is None}
        upstream = {job.case.label: value for job, value in cycles.items() if job.implementation.name == "upstream"}
        for job, outcome in pairs:
            if outcome.failure is not None:
                failures.append(Failure(f"{job.case.label}/{job.label}", core.name, outcome.failure))
                continue
            reference = upstream.get(job.case.label)
            records.append(_record(job, outcome, core, cycles[job], reference, peaks, models.disassembler))
    return Results(records, failures)


def _learn(models: Model, core: Core, regions: Sequence[Sequence[Block]], progress: Progress) -> None:
    known = 0

    def advance(done: int, total: int) -> None:
        nonlocal known
        if known == 0:
            progress.phase(f"modelling on {core.name}", total)
        progress.advance(done - known)
        known = done

    models.learn(regions, core, advance)


def _record(
    job: Job,
    outcome: Outcome,
    core: Core,
    cycles: float,
    upstream: float | None,
    peaks: Peaks,
    disassembler: Disassembler,
) -> Record:
    work = job.case.work
    required = work.bytes_read + work.bytes_written
    tolerance = job.implementation.tolerance or job.case.tolerance
    return Record(
        op=job.case.op,
        case=job.case.name,
        impl=job.implementation.name,
        isa=job.isa or "",
        core=core.name,
        instructions=total_instructions(outcome.blocks),
        cycles=round(cycles),
        peak_fraction=round(peaks.fewest_cycles(work) / cycles, 4),
        ratio_to_upstream=None if upstream is None else round(cycles / upstream, 4),
        max_error=outcome.max_error,
        correct=outcome.max_error <= tolerance,
        multiply_accumulates_per_cycle=round(work.multiply_accumulates / cycles, 3),
        required_bytes=required,
        accessed_bytes=accessed_bytes(outcome.blocks, core, disassembler),
        bytes_per_cycle=round(required / cycles, 3),
        bound="memory" if required / cycles > MEMORY_BYTES_PER_CYCLE else "compute",
    )
