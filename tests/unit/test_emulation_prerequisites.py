# SPDX-License-Identifier: Apache-2.0
"""A machine that cannot emulate is told what it lacks."""

from __future__ import annotations

import os
import types

import pytest

from tests.emulation import recipe


@pytest.fixture
def capable(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine that has everything."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "uname", lambda: types.SimpleNamespace(machine="x86_64"))
    monkeypatch.setattr(recipe.shutil, "which", lambda command: f"/usr/bin/{command}")
    return monkeypatch


def test_nothing_is_missing(capable: pytest.MonkeyPatch) -> None:
    assert recipe.missing_prerequisites() is None


def test_packages_are_listed(capable: pytest.MonkeyPatch) -> None:
    absent = {"qemu-aarch64", "qemu-aarch64-static", "mmdebstrap", "aarch64-linux-gnu-gcc"}
    capable.setattr(recipe.shutil, "which", lambda name: None if name in absent else name)
    expected = "apt-get install g++-aarch64-linux-gnu mmdebstrap qemu-user-static"
    assert recipe.missing_prerequisites() == f"missing packages: {expected}"


def test_privileges_and_machine(capable: pytest.MonkeyPatch) -> None:
    capable.setattr(os, "geteuid", lambda: 1000)
    assert "root privileges" in str(recipe.missing_prerequisites())
    capable.setattr(os, "uname", lambda: types.SimpleNamespace(machine="aarch64"))
    assert "needs x86-64 Linux" in str(recipe.missing_prerequisites())
