# SPDX-License-Identifier: Apache-2.0
"""Times every implementation of a case, in turns."""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases import Case
from vllm_arm import _host

PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Variant:
    """One row of the result: ``name`` of an implementation, and the ``isa`` of ours."""

    name: str
    isa: str | None

    @property
    def label(self) -> str:
        """``vllm_arm/neon``, ``upstream`` or ``torch``."""
        return f"{self.name}/{self.isa}" if self.isa else self.name


@dataclass
class Timing:
    """What was measured of one variant: seconds a run of each round, or why there is none."""

    variant: Variant
    max_error: float = 0.0
    tolerance: float = float("inf")
    seconds: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return median(self.seconds)

    @property
    def is_wrong(self) -> bool:
        """Whether a result was off by more than the case allows. Not a number counts as wrong."""
        return not self.max_error <= self.tolerance


def variants(case: Case, features: _host.Features, operations: dict[str, list[str]]) -> list[Variant]:
    """Every implementation of ``case``; ours in each variant that a CPU with ``features`` runs."""
    found = []
    for implementation in case.implementations:
        if implementation.operation is None:
            found.append(Variant(implementation.name, None))
            continue
        for isa in operations.get(implementation.operation, []):
            if not _host.missing_features(isa, features):
                found.append(Variant(implementation.name, isa))
    return found


class _Server:
    """A process that times one variant on demand."""

    def __init__(self, case: Case, timing: Timing, threads: int, errors: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
        if timing.variant.isa:
            environment["VLLM_ARM_ISA"] = timing.variant.isa
        self.timing = timing
        self._errors = errors
        command = [sys.executable, "-P", "-m", "benchmarks.timing.server"]
        with errors.open("w") as stderr:
            self._process = subprocess.Popen(
                [*command, case.op, case.name, timing.variant.name, str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
            )

    def take(self) -> None:
        """Wait for the next report and note it in the timing."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            said = self._errors.read_text(errors="replace").strip().splitlines()
            ended = f"signal {-code}" if code < 0 else f"exit code {code}"
            self.timing.failure = f"{ended}: {said[-1]}" if said and code > 0 else ended
            return
        report: dict[str, Any] = json.loads(line)
        if "failure" in report:
            self.timing.failure = report["failure"]
            return
        errors = (self.timing.max_error, report["max_error"])
        # max() may drop one that is not a number.
        self.timing.max_error = math.inf if any(map(math.isnan, errors)) else max(errors)
        self.timing.tolerance = report.get("tolerance", self.timing.tolerance)
        if "seconds" in report:
            self.timing.seconds.append(report["seconds"])

    def ask(self) -> None:
        """Have a batch timed."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def _serving(case: Case, timings: list[Timing], threads: int) -> Iterator[list[_Server]]:
    servers: list[_Server] = []
    with tempfile.TemporaryDirectory(prefix="kernels-") as directory:
        try:
            for number, timing in enumerate(timings):
                server = _Server(case, timing, threads, Path(directory, str(number)))
                servers.append(server)
                # One after another: each chooses the size of its batch alone.
                server.take()
            yield servers
        finally:
            for server in servers:
                server.close()


def time_case(case: Case, chosen: list[Variant], threads: int, rounds: int) -> list[Timing]:
    """Time each of ``chosen`` in each of ``rounds``, one after another, on ``threads`` threads."""
    timings = [Timing(variant) for variant in chosen]
    with _serving(case, timings, threads) as servers:
        for number in range(rounds):
            for server in servers if number % 2 == 0 else reversed(servers):
                if server.timing.failure is None:
                    server.ask()
                    server.take()
    return timings
