# SPDX-License-Identifier: Apache-2.0
"""Which cases, implementations and cores a run is about."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cases import Case, select
from benchmarks.neoverse.cores import CORES, MAIN_CORE, Core
from benchmarks.neoverse.runner import REPOSITORY, Job

OPERATIONS_FILE = REPOSITORY / "cmake" / "operations.cmake"
_OPERATION = re.compile(r"^vllm_arm_operation\((\w+) (\w+) ([\w ]+)\)", re.MULTILINE)


@dataclass(frozen=True)
class Selection:
    """Jobs and the cores they are modelled on."""

    jobs: tuple[Job, ...]
    cores: tuple[Core, ...]


def kernel_variants(file: Path = OPERATIONS_FILE) -> dict[str, tuple[str, ...]]:
    """The variants of each op of ours, from the build's list. Raises ``ValueError`` where it has none."""
    variants = {name: tuple(isas.split()) for name, _, isas in _OPERATION.findall(file.read_text())}
    if not variants:
        raise ValueError(f"{file}: no vllm_arm_operation(NAME FOLDER VARIANTS...) found")
    return variants


def jobs_of(cases: Iterable[Case], variants: dict[str, tuple[str, ...]]) -> list[Job]:
    """Every implementation of the cases, ours once per variant."""
    jobs = []
    for case in cases:
        for implementation in case.implementations:
            isas: Sequence[str | None] = [None]
            if implementation.operation:
                isas = variants[implementation.operation]
            jobs += [Job(case, implementation, isa) for isa in isas]
    return jobs


def choose(
    op: str | None = None, case: str | None = None, implementation: str | None = None, cores: Sequence[str] = ()
) -> Selection:
    """What the command line's options name; None and an empty sequence stand for all.

    ``implementation`` is ``vllm_arm``, ``vllm_arm/neon``, ``upstream`` or ``torch``. Raises ``ValueError`` naming
    what there is where an option fits nothing.
    """
    every = jobs_of(select(op, case), kernel_variants())
    jobs = tuple(job for job in every if implementation in (None, job.label, job.implementation.name))
    if not jobs:
        labels = ", ".join(sorted({job.label for job in every}))
        raise ValueError(f"implementation {implementation!r}: expected one of {labels}")
    return Selection(jobs, tuple(CORES[name] for name in cores) or tuple(CORES.values()))


def short_selections() -> list[Selection]:
    """What fits into three minutes: our norm kernels on every core, and one case of attention on one."""
    return [choose("norm", implementation="vllm_arm"), choose("attention", "decode_d64", cores=[MAIN_CORE.name])]
