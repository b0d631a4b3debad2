# SPDX-License-Identifier: Apache-2.0
"""Runs in the emulated server under the counting plugin: `python -m benchmarks.neoverse.guest JOBS`.

JOBS is a JSON file: {"jobs": [[op, case, implementation, region], ...], "reference_conditions": bool}. Each job runs
in a process forked off for it, so that counts do not depend on what ran before, and an illegal instruction ends that
one only. One JSON line is printed for each: {"region": N, "max_error": X} or {"region": N, "failure": "why"}.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case, Implementation, max_error, select
from benchmarks.cases.upstream import operators

# See plugin/bbcount.c.
MARK_START = 0x5EED0000
# oneDNN chooses and packs in the first run, and reaches its steady state in the second.
WARM_UPS = 2
NOWHERE = os.open(os.devnull, os.O_RDONLY)


def mark(which: int) -> None:
    """Tell the plugin: a system call without effect, and the cheapest that Python offers."""
    os.lseek(NOWHERE, MARK_START + which, os.SEEK_SET)


def failing_mark(which: int) -> None:
    """The mark that the README's reference figures were taken with: its exception falls into the region."""
    try:  # noqa: SIM105 (contextlib.suppress would add instructions)
        os.getpriority(os.PRIO_PROCESS, MARK_START + which)
    except OSError:
        pass


def measure(
    implementation: Implementation, inputs: Any, reference: torch.Tensor, region: int, reference_conditions: bool
) -> float:
    """Run it between marks; returns the error of that run's result."""
    call = implementation.prepare(inputs)
    for _ in range(WARM_UPS):
        call.reset()
        call.run()
    call.reset()
    run = call.run
    set_mark = failing_mark if reference_conditions else mark
    set_mark(0)
    run()
    set_mark(1 + region)
    return max_error(call.output(), reference)


def report(region: int, **result: object) -> None:
    """Print one result at once."""
    os.write(sys.stdout.fileno(), (json.dumps({"region": region, **result}) + "\n").encode())


def in_child(action: Callable[[], None]) -> int:
    """Fork, run ``action`` there and return the exit code, minus the number of the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_implementation(
    case: Case, name: str, region: int, inputs: Any, reference: torch.Tensor, reference_conditions: bool
) -> None:
    """Measure one implementation in a child and report."""
    (implementation,) = (each for each in case.implementations if each.name == name)

    def action() -> None:
        if implementation.operation:
            check_variant(implementation.operation)
        try:
            error = measure(implementation, inputs, reference, region, reference_conditions)
        except (RuntimeError, NotImplementedError, AttributeError) as refusal:
            report(region, failure=str(refusal).splitlines()[0])
        else:
            report(region, max_error=error)

    code = in_child(action)
    if code:
        report(region, failure=signal.strsignal(-code) if code < 0 else f"exit code {code}")


def check_variant(operation: str) -> None:
    """Raise ``RuntimeError`` unless the variant that VLLM_ARM_ISA names is the one that runs."""
    from vllm_arm import ops

    forced, active = os.environ["VLLM_ARM_ISA"], ops.active_isa(operation)
    if forced != active:
        raise RuntimeError(f"{operation}: VLLM_ARM_ISA={forced} runs {active}: is the wheel of this source?")


def run_case(case: Case, jobs: list[tuple[str, int]], reference_conditions: bool) -> None:
    """Make inputs and the reference once, then measure each of ``jobs`` (implementation and region)."""
    torch.manual_seed(0)
    inputs = case.inputs()
    reference = case.reference(inputs)
    for name, region in jobs:
        run_implementation(case, name, region, inputs, reference, reference_conditions)


def main(jobs_file: str) -> None:
    """Run all jobs in order."""
    orders = json.loads(Path(jobs_file).read_text())
    jobs, reference_conditions = orders["jobs"], orders["reference_conditions"]
    # A collection in the middle of a region would be counted with it.
    gc.disable()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if any(name == "upstream" for _, _, name, _ in jobs):
        operators()
    if any(name == "vllm_arm" for _, _, name, _ in jobs):
        import vllm_arm.ops  # noqa: F401
    for (op, case_name), group in groupby(jobs, key=lambda job: (job[0], job[1])):
        (case,) = select(op, case_name)
        named = [(name, region) for _, _, name, region in group]
        code = in_child(functools.partial(run_case, case, named, reference_conditions))
        if code:
            for _, region in named:
                report(region, failure=f"the inputs could not be made (exit code {code})")


if __name__ == "__main__":
    main(sys.argv[1])
