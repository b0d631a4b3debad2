# SPDX-License-Identifier: Apache-2.0
"""The JSON of a benchmark: every run as it ends, so that a stopped benchmark goes on where it was."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

_FORMAT = 1


def write_atomically(path: Path, value: object) -> None:
    """Write ``value`` as JSON to ``path``, which holds either the old content or the new at every moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.replace(path)


def key_of(*parts: object) -> str:
    """A short digest of ``parts``, which must be JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


class Store:
    """The runs of one workload on one host, in a file named by both.

    A run is keyed by its step and round. Failed runs are kept for the report, and are missing where it is asked what
    is still to do.
    """

    def __init__(self, directory: Path, name: str, workload: dict[str, Any], identity: dict[str, Any]) -> None:
        self.key = key_of(_FORMAT, workload, identity)
        self.path = directory / f"{name}-{self.key}.json"
        self._content: dict[str, Any] = {"format": _FORMAT, "key": self.key, "workload": workload, "runs": []}
        if self.path.exists():
            content = json.loads(self.path.read_text())
            if content.get("key") == self.key:
                self._content = content

    @property
    def runs(self) -> list[dict[str, Any]]:
        """Every run so far: ``step``, ``round``, and either its figures or ``error``."""
        return list(self._content["runs"])

    def has(self, step: str, round_number: int) -> bool:
        """Whether this run has succeeded already."""
        return any(
            run["step"] == step and run["round"] == round_number and "error" not in run for run in self._content["runs"]
        )

    def add(self, step: str, round_number: int, figures: dict[str, Any]) -> None:
        """Keep a run in place of an earlier one of the same step and round, and write the file."""
        kept = [run for run in self._content["runs"] if (run["step"], run["round"]) != (step, round_number)]
        self._content["runs"] = [*kept, {"step": step, "round": round_number, **figures}]
        self._write()

    def set(self, name: str, value: object) -> None:
        """Keep something beside the runs, and write the file."""
        self._content[name] = value
        self._write()

    def clear(self) -> None:
        """Forget every run."""
        self._content["runs"] = []

    def _write(self) -> None:
        write_atomically(self.path, self._content)
