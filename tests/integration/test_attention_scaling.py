# SPDX-License-Identifier: Apache-2.0
"""Two threads against one on attention cases of more than a millisecond.

In CPU time of the busier thread, which other work on the machine hardly changes; waiting threads sleep.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.cases import select

PROJECT = Path(__file__).resolve().parents[2]
# Of one thread's time: half, and what CPU times read to 10 ms on a busy machine are off by.
LARGEST_SHARE = 0.6
ROUNDS = 12
SECONDS = 0.15  # of a round, for one thread


def cpu_seconds() -> dict[int, float]:
    """Of each thread of this process."""
    return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}


def measure(op: str, name: str) -> None:
    """Print the busier thread's share of one thread's time, and seconds of one run on one thread."""
    (case,) = select(op, name)
    (ours,) = (each for each in case.implementations if each.name == "vllm_arm")
    inputs = case.inputs()
    calls = {}
    for count in (1, 2):
        torch.set_num_threads(count)
        # The schedule is made for the threads that there are.
        calls[count] = ours.prepare(inputs)
        calls[count].run()
    started = time.process_time()
    calls[1].run()
    runs = max(1, round(SECONDS / (time.process_time() - started)))
    busiest = {1: 0.0, 2: 0.0}
    for _ in range(ROUNDS):
        for count in (1, 2):
            torch.set_num_threads(count)
            before = cpu_seconds()
            for _ in range(runs):
                calls[count].run()
            busiest[count] += max(now - before.get(thread, 0.0) for thread, now in cpu_seconds().items())
    print(json.dumps({"share": busiest[2] / busiest[1], "seconds": busiest[1] / ROUNDS / runs}))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU only")
@pytest.mark.parametrize("label", ["attention/chunk_64_of_1024", "attention/decode_2k_fp8"])
def test_two_threads_halve_the_time(label: str) -> None:
    code = f"from tests.integration.test_attention_scaling import measure; measure(*{label.split('/')!r})"
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["seconds"] > 1e-3, "too short to be divided"
    assert result["share"] <= LARGEST_SHARE
