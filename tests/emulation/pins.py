# SPDX-License-Identifier: Apache-2.0
"""Read the pinned requirements as they apply to the emulated server, and let pip fetch them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS_DIRECTORY = Path(__file__).resolve().parents[2] / "requirements"
REQUIREMENT_FILES = ("core.txt", "vllm.txt", "test.txt")
PYTHON_VERSION = "3.13"
TARGET_ENVIRONMENT = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "aarch64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": f"{PYTHON_VERSION}.0",
    "python_version": PYTHON_VERSION,
    "sys_platform": "linux",
}
# Debian trixie has glibc 2.41, and pip has no "up to" for a foreign platform.
GLIBC_MINORS = (17, 24, 26, 27, 28, 31, 34, 35, 39)
PLATFORM_TAGS = (
    *(f"manylinux_2_{minor}_aarch64" for minor in reversed(GLIBC_MINORS)),
    "manylinux2014_aarch64",
    "linux_aarch64",
)


def read_pins(directory: Path, names: Sequence[str] = REQUIREMENT_FILES) -> list[str]:
    """The `name==version` lines of the named files that apply to CPython 3.13 on aarch64 Linux.

    Environment markers are judged for the emulated server, because pip would judge them for the
    machine that it runs on. `-r other.txt` is followed. Raises ValueError, naming file and line,
    for anything that is not a pinned requirement.
    """
    pins: dict[str, str] = {}
    for place, requirement in _read(directory, names, set()):
        if requirement.marker and not requirement.marker.evaluate(dict(TARGET_ENVIRONMENT)):
            continue
        if requirement.url or not str(requirement.specifier).startswith("=="):
            raise ValueError(f"{place}: expected name==version, found: {requirement}")
        name = canonicalize_name(requirement.name)
        pin = f"{name}{requirement.specifier}"
        known = pins.setdefault(name, pin)
        if known != pin:
            raise ValueError(f"{place}: {pin} conflicts with {known}")
    return sorted(pins.values())


def _read(directory: Path, names: Sequence[str], seen: set[str]) -> Iterator[tuple[str, Requirement]]:
    for name in names:
        if name in seen:
            continue
        seen.add(name)
        for number, raw in enumerate((directory / name).read_text().splitlines(), 1):
            line = raw.split(" #")[0].strip()
            place = f"{directory / name}:{number}"
            if not line or line.startswith("#"):
                continue
            if line.startswith("-r "):
                yield from _read(directory, [line[3:].strip()], seen)
                continue
            try:
                yield place, Requirement(line)
            except InvalidRequirement as error:
                raise ValueError(f"{place}: expected name==version, found: {line}") from error


def pip_install(requirements: Sequence[str | Path], site: Path, scratch: Path) -> None:
    """Unpack aarch64 wheels for `requirements` (pins or wheel files) into the directory `site`.

    `scratch` should be on the same file system, so that pip moves files instead of copying them.
    Raises RuntimeError with pip's own error lines.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--no-warn-conflicts", "--root-user-action=ignore", "--only-binary=:all:"]
    command += ["--implementation=cp", f"--python-version={PYTHON_VERSION}"]
    command += [f"--abi={abi}" for abi in ("cp313", "abi3", "none")]
    command += [f"--platform={tag}" for tag in PLATFORM_TAGS]
    command += ["--upgrade", f"--target={site}", *map(str, requirements)]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise RuntimeError("pip: " + ("\n".join(errors) or done.stderr.strip()))
