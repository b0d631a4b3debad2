# SPDX-License-Identifier: Apache-2.0
"""One implementation of one case in a process of its own: ``python -P -m benchmarks.timing.server OP CASE NAME N``.

N is the number of threads. It prints one JSON line when it is ready, then one for each line that it reads: it times a
batch of runs, then checks the result of one more. A process of its own, so that VLLM_ARM_ISA picks the variant and an
illegal instruction ends that implementation only; a parent that asks the processes of a case in turns interleaves them.
"""

import json
import math
import sys
import time
from typing import Any

import torch

from benchmarks.cases import Call, max_error, select

BATCH_SECONDS = 0.05
WARM_UPS = 3


def say(**report: Any) -> None:
    """Print one report at once."""
    print(json.dumps(report), flush=True)


def time_runs(call: Call, runs: int) -> float:
    """Seconds of each of ``runs`` runs, on average."""
    run = call.run
    started = time.perf_counter()
    for _ in range(runs):
        run()
    return (time.perf_counter() - started) / runs


def check(call: Call, reference: torch.Tensor) -> float:
    """The error of one run from fresh inputs."""
    call.reset()
    call.run()
    return max_error(call.output(), reference)


def prepare(op: str, case_name: str, name: str) -> tuple[Call, torch.Tensor, float]:
    """The implementation ``name`` of a case, its reference and its tolerance."""
    (case,) = select(op, case_name)
    (implementation,) = (each for each in case.implementations if each.name == name)
    torch.manual_seed(0)
    inputs = case.inputs()
    reference = case.reference(inputs)
    tolerance = case.tolerance if implementation.tolerance is None else implementation.tolerance
    return implementation.prepare(inputs), reference, tolerance


def main(op: str, case_name: str, name: str, threads: int) -> None:
    """Serve until stdin ends."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    try:
        call, reference, tolerance = prepare(op, case_name, name)
        for _ in range(WARM_UPS):
            call.run()
        runs = max(1, math.ceil(BATCH_SECONDS / time_runs(call, 1)))
        error = check(call, reference)
    except (RuntimeError, NotImplementedError, AttributeError, ImportError) as refusal:
        say(failure=str(refusal).splitlines()[0])
        return
    say(runs=runs, max_error=error, tolerance=tolerance)
    for _ in sys.stdin:
        call.reset()
        say(seconds=time_runs(call, runs), max_error=check(call, reference))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
