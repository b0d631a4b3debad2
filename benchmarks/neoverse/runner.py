# SPDX-License-Identifier: Apache-2.0
"""Count cases in emulated servers, one guest for each core and kernel variant."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, Implementation
from benchmarks.neoverse.cores import Core
from benchmarks.neoverse.counts import Block, read_counts
from benchmarks.neoverse.tools import Tools, build_bundle, emulator_command
from tests.emulation.guest import ArmRoot
from tests.emulation.launcher import Bind, LaunchSpec

REPOSITORY = Path(__file__).resolve().parents[2]
GUEST_PROJECT = "/opt/project"
GUEST_BUNDLE = "/opt/counting"
GUEST_RESULTS = "/opt/results"
# Seconds for one guest; a complete run takes a third of it on two cores.
TIMEOUT = 3600.0
GUESTS_AT_ONCE = 2
ENVIRONMENT = {
    # The plugin counts one thread.
    "OMP_NUM_THREADS": "1",
    # Else the order of dictionaries, and with it the count, differs between runs.
    "PYTHONHASHSEED": "0",
}


@dataclass(frozen=True)
class Job:
    """One implementation of one case; ``isa`` is the variant of ours, None for others."""

    case: Case
    implementation: Implementation
    isa: str | None

    @property
    def label(self) -> str:
        """``vllm_arm/neon``, ``upstream`` or ``torch``."""
        return f"{self.implementation.name}/{self.isa}" if self.isa else self.implementation.name


@dataclass(frozen=True)
class Outcome:
    """A job's executed blocks and the error of its result, or why there are none."""

    blocks: tuple[Block, ...] = ()
    max_error: float = 0.0
    failure: str | None = None


@dataclass
class CountingRoot(ArmRoot):
    """An emulated server that shows another /proc/cpuinfo where ``cpuinfo`` is given."""

    cpuinfo: str | None = None

    def launch_spec(self, args: Sequence[str | Path], **options: Any) -> LaunchSpec:
        """As ArmRoot's, with the replacement."""
        spec = super().launch_spec(args, **options)
        return {**spec, "cpuinfo": self.cpuinfo} if self.cpuinfo else spec


@dataclass(frozen=True)
class Runner:
    """Runs jobs in ``root``; ``scratch`` is a folder for the emulator and the counts.

    With ``reference_conditions`` marks are those of the README's reference figures, see guest.py.
    """

    root: CountingRoot
    tools: Tools
    scratch: Path
    reference_conditions: bool = False

    def run(
        self, work: Mapping[Core, Sequence[Job]], finished: Callable[[Job], None]
    ) -> dict[tuple[Core, Job], Outcome]:
        """Count each job as the core of its list; ``finished`` is called after each, from other threads."""
        bundle = self.scratch / "bundle"
        build_bundle(self.tools, bundle)
        guests: dict[tuple[Core, str | None], list[Job]] = {}
        for core, jobs in work.items():
            for job in jobs:
                guests.setdefault((core, job.isa), []).append(job)
        workers = min(GUESTS_AT_ONCE, os.cpu_count() or 1)
        results: dict[tuple[Core, Job], Outcome] = {}
        with ThreadPoolExecutor(workers) as pool:
            counted = pool.map(
                lambda guest: self._run_guest(guest[0][0], guest[0][1], guest[1], bundle, finished), guests.items()
            )
            for (core, _), outcomes in zip(guests, counted, strict=True):
                results.update({(core, job): outcome for job, outcome in outcomes.items()})
        return results

    def _run_guest(
        self, core: Core, isa: str | None, jobs: list[Job], bundle: Path, finished: Callable[[Job], None]
    ) -> dict[Job, Outcome]:
        with tempfile.TemporaryDirectory(dir=self.scratch, prefix="guest-") as folder:
            results = Path(folder)
            order = [[job.case.op, job.case.name, job.implementation.name, region] for region, job in enumerate(jobs)]
            orders = {"jobs": order, "reference_conditions": self.reference_conditions}
            (results / "jobs.json").write_text(json.dumps(orders))
            with (results / "stderr").open("w+") as errors:
                guest = self._start(core, isa, bundle, results, errors)
                alarm = threading.Timer(TIMEOUT, guest.kill)
                alarm.start()
                outcomes: dict[Job, Outcome] = {}
                try:
                    for line in guest.stdout or ():
                        job, outcome = self._read_outcome(json.loads(line), jobs, results)
                        outcomes[job] = outcome
                        finished(job)
                    code = guest.wait()
                except BaseException:
                    guest.kill()
                    guest.wait()
                    raise
                finally:
                    alarm.cancel()
                errors.seek(0)
                if code or len(outcomes) != len(jobs):
                    tail = "\n".join(errors.read().splitlines()[-5:])
                    raise RuntimeError(f"the guest for {core.name} ended with {code} before its time: {tail}")
        return outcomes

    def _start(self, core: Core, isa: str | None, bundle: Path, results: Path, errors: Any) -> subprocess.Popen[str]:
        binds = [
            Bind(host=str(bundle), guest=GUEST_BUNDLE, read_only=True),
            Bind(host=str(REPOSITORY / "benchmarks"), guest=f"{GUEST_PROJECT}/benchmarks", read_only=True),
            Bind(host=str(results), guest=GUEST_RESULTS, read_only=False),
        ]
        program = ["/usr/bin/python3.13", "-m", "benchmarks.neoverse.guest", f"{GUEST_RESULTS}/jobs.json"]
        return self.root.popen(
            [*emulator_command(GUEST_BUNDLE, f"{GUEST_RESULTS}/counts"), *program],
            stdout=subprocess.PIPE,
            stderr=errors,
            cpu=core.guest,
            midr=core.midr,
            env={**ENVIRONMENT, **({"VLLM_ARM_ISA": isa} if isa else {})},
            binds=binds,
            cwd=GUEST_PROJECT,
        )

    def _read_outcome(self, line: dict[str, Any], jobs: list[Job], results: Path) -> tuple[Job, Outcome]:
        job = jobs[line["region"]]
        if "failure" in line:
            return job, Outcome(failure=line["failure"])
        counts = results / f"counts.{line['region']}"
        outcome = Outcome(tuple(read_counts(counts)), line["max_error"])
        counts.unlink()
        return job, outcome
