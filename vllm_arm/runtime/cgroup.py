# SPDX-License-Identifier: Apache-2.0
"""CPU and memory limits that control groups (v1, v2 or both) put on this process.

Also holds the kernel's CPU list format ("0-3,8"), which cpusets, sysfs and vLLM share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MAX_CPU_ID = 65535
"""Largest CPU id accepted, far above any kernel's limit: bounds what a mistyped range costs."""

_UNLIMITED_V1_BYTES = 1 << 62
_CONTROLLERS = ("cpu", "cpuset", "memory")


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """Limits of the process's control group, each None where nothing limits it.

    `cpuset` and `memory_nodes` are ids, `cpu_quota` is in CPUs (0.5 is half a CPU) and
    `memory_bytes` in bytes. `notes` says what could not be understood and was ignored.
    """

    cpuset: frozenset[int] | None = None
    cpu_quota: float | None = None
    memory_bytes: int | None = None
    memory_nodes: frozenset[int] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Mount:
    """One cgroup mount: the part of the hierarchy it shows (`top`) and where (`point`)."""

    top: str
    point: str
    controllers: frozenset[str]
    unified: bool


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parse the kernel's list format, such as "0-3,8", into ascending ids without duplicates.

    An empty or blank text is the empty list, as sysfs writes it. Raises ValueError with the
    offending part for anything else that is not a number or an ascending range of numbers.
    """
    if not text.strip():
        return ()
    ids: set[int] = set()
    for part in text.split(","):
        item = part.strip()
        match = re.fullmatch(r"([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?", item)
        if match is None:
            raise ValueError(f"{item!r} in {text.strip()!r} is neither a number nor a range a-b")
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if last < first:
            raise ValueError(f"range {item!r} in {text.strip()!r} runs backwards")
        if last > MAX_CPU_ID:
            raise ValueError(f"{item!r} in {text.strip()!r} exceeds the largest id {MAX_CPU_ID}")
        ids.update(range(first, last + 1))
    return tuple(sorted(ids))


def format_cpu_list(ids: Iterable[int]) -> str:
    """Write ids in the kernel's list format, ascending: {8, 0, 1, 2} becomes "0-2,8"."""
    runs: list[list[int]] = []
    for value in sorted(set(ids)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def read_text(path: Path) -> str | None:
    """Content of a small file without surrounding blanks, or None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_limits(root: Path = Path("/")) -> CgroupLimits:
    """Read the limits on this process from `root`/proc/self/cgroup and the mounts it names.

    Every level from the process's group up to the mount point counts and the tightest quota
    and memory limit win. Unreadable or malformed files are ignored and noted, never an error.
    """
    return _LimitsReader(root).read()


class _LimitsReader:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._notes: list[str] = []

    def read(self) -> CgroupLimits:
        paths = self._group_paths()
        levels: dict[str, list[Path]] = {}
        for mount in self._mounts():
            if mount.unified:
                if "" in paths:
                    levels.setdefault("unified", self._levels(mount, paths[""]))
                continue
            for controller in mount.controllers.intersection(paths):
                levels.setdefault(controller, self._levels(mount, paths[controller]))
        unified = levels.get("unified", [])
        quotas = [self._quota_unified(level) for level in unified]
        quotas += [self._quota_v1(level) for level in levels.get("cpu", [])]
        memory = [self._bytes(level / "memory.max") for level in unified]
        memory += [self._bytes(level / "memory.limit_in_bytes") for level in levels.get("memory", [])]
        sets = [level / "cpuset" for level in [*unified, *levels.get("cpuset", [])]]
        return CgroupLimits(
            cpuset=self._first_list(sets, (".cpus.effective", ".effective_cpus", ".cpus")),
            cpu_quota=min((value for value in quotas if value is not None), default=None),
            memory_bytes=min((value for value in memory if value is not None), default=None),
            memory_nodes=self._first_list(sets, (".mems.effective", ".effective_mems", ".mems")),
            notes=tuple(self._notes),
        )

    def _group_paths(self) -> dict[str, str]:
        """Path of this process's group per v1 controller, and under "" in the v2 hierarchy."""
        paths: dict[str, str] = {}
        for line in (read_text(self._root / "proc/self/cgroup") or "").splitlines():
            fields = line.split(":", 2)
            if len(fields) != 3:
                self._notes.append(f"/proc/self/cgroup has a malformed line {line!r}: ignored")
                continue
            for controller in fields[1].split(","):
                paths[controller] = fields[2]
        return paths

    def _mounts(self) -> list[_Mount]:
        mounts: list[_Mount] = []
        for line in (read_text(self._root / "proc/self/mountinfo") or "").splitlines():
            before, separator, after = line.partition(" - ")
            fields, kind = before.split(), after.split()
            if not separator or len(fields) < 6 or len(kind) < 3:
                continue
            if kind[0] not in ("cgroup", "cgroup2"):
                continue
            mounts.append(
                _Mount(
                    top=_unescape(fields[3]),
                    point=_unescape(fields[4]),
                    controllers=frozenset(kind[2].split(",")).intersection(_CONTROLLERS),
                    unified=kind[0] == "cgroup2",
                )
            )
        return mounts

    def _levels(self, mount: _Mount, path: str) -> list[Path]:
        """Directories of the group and its ancestors, innermost first, as far as mounted."""
        top = self._root / mount.point.lstrip("/")
        relative = PurePosixPath(path)
        if relative.is_relative_to(mount.top):
            relative = relative.relative_to(mount.top)
        else:
            # The mount shows another part of the hierarchy: inside a container, its own group.
            relative = PurePosixPath()
        if ".." in relative.parts:
            relative = PurePosixPath()
        chain = [relative, *relative.parents]
        return [top / level for level in chain]

    def _quota_unified(self, level: Path) -> float | None:
        text = read_text(level / "cpu.max")
        if text is None or text.split()[:1] == ["max"]:
            return None
        match = re.fullmatch(r"([0-9]+)\s+([0-9]+)", text)
        return self._ratio(level / "cpu.max", text, match)

    def _quota_v1(self, level: Path) -> float | None:
        quota = read_text(level / "cpu.cfs_quota_us")
        period = read_text(level / "cpu.cfs_period_us")
        if quota is None or period is None or quota == "-1":
            return None
        text = f"{quota} {period}"
        return self._ratio(level / "cpu.cfs_quota_us", text, re.fullmatch(r"(\d+) (\d+)", text))

    def _ratio(self, path: Path, text: str, match: re.Match[str] | None) -> float | None:
        if match is None or int(match[1]) == 0 or int(match[2]) == 0:
            self._ignore(path, text, "a quota and a period in microseconds")
            return None
        return int(match[1]) / int(match[2])

    def _bytes(self, path: Path) -> int | None:
        text = read_text(path)
        if text is None or text == "max":
            return None
        if not re.fullmatch(r"[0-9]+", text):
            self._ignore(path, text, "a number of bytes")
            return None
        return int(text) if int(text) < _UNLIMITED_V1_BYTES else None

    def _first_list(self, sets: list[Path], suffixes: tuple[str, ...]) -> frozenset[int] | None:
        """The innermost list that says something: an empty one inherits from its parent."""
        for base in sets:
            for suffix in suffixes:
                path = base.with_name(base.name + suffix)
                text = read_text(path)
                if not text:
                    continue
                try:
                    return frozenset(parse_cpu_list(text))
                except ValueError:
                    self._ignore(path, text, "a list such as 0-3,8")
        return None

    def _ignore(self, path: Path, text: str, expected: str) -> None:
        shown = f"/{path.relative_to(self._root)}"
        self._notes.append(f"{shown} holds {text[:40]!r} instead of {expected}: ignored")


def _unescape(field: str) -> str:
    """Undo mountinfo's octal escapes (a blank is written as backslash 040)."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
