# SPDX-License-Identifier: Apache-2.0
"""A machine without the programs is told what to install."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.neoverse import tools
from tests.unit.cycles_helpers import write_program

QEMU = 'import sys\nprint({help!r} if "--help" in sys.argv else "qemu-aarch64 version {version}")\n'


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH that has everything."""
    for command in tools.PACKAGES:
        write_program(tmp_path / command, "")
    write_program(tmp_path / "qemu-aarch64", QEMU.format(help="-plugin [file=]<file>", version="7.2.22"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_all_are_found(programs: Path) -> None:
    assert tools.find_tools() == tools.Tools(
        *(programs / command for command in ("qemu-aarch64", "gcc", "llvm-mc-19", "llvm-mca-19"))
    )


def test_missing_packages_are_listed_once(programs: Path) -> None:
    for command in ("qemu-aarch64", "llvm-mc-19", "llvm-mca-19"):
        (programs / command).unlink()
    with pytest.raises(LookupError, match=r"^missing packages: apt-get install llvm-19 qemu-user$"):
        tools.find_tools()


@pytest.mark.parametrize(
    ("usage", "version", "message"),
    [("-cpu model", "7.2.22", "takes no plugins"), ("-plugin", "10.0.2", "expected a version from 7 to 8")],
)
def test_an_unfit_qemu_is_named(programs: Path, usage: str, version: str, message: str) -> None:
    write_program(programs / "qemu-aarch64", QEMU.format(help=usage, version=version))
    with pytest.raises(LookupError, match=message):
        tools.find_tools()
