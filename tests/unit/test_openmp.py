# SPDX-License-Identifier: Apache-2.0
"""The choice of the OpenMP runtime, and one runtime for all of its copies."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_arm.runtime import openmp
from vllm_arm.runtime.choice import Choice

OLD = b"\0GOMP_1.0\0OMP_1.0\0GOMP_4.5\0"
NEW = b"\0GOMP_1.0\0OMP_1.0\0GOMP_4.5\0GOMP_5.0.1\0"


class Machine:
    """A site-packages with torch, and a system libgomp."""

    def __init__(self, root: Path) -> None:
        self.site = root / "site"
        self.torch = self.site / "torch"
        self.bundled = self.torch / "lib/libgomp.so.1"
        self.system = root / "usr/lib/libgomp.so.1"
        for library, content in ((self.bundled, OLD), (self.system, NEW)):
            library.parent.mkdir(parents=True)
            library.write_bytes(content)
        self.lse: dict[Path, int] = {self.bundled: 0, self.system: 12}

    def choose(self, ld_preload: str = "", has_lse: bool = True) -> Choice:
        lse: Mapping[Path, int] = self.lse
        return openmp.choose(
            ld_preload,
            self.torch,
            has_lse=has_lse,
            candidates=[self.system] if self.system.exists() else [],
            count_atomics=lambda path: SimpleNamespace(lse=lse[Path(path)]),
        )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.delenv("VLLM_ARM_OPENMP", raising=False)
    return Machine(tmp_path)


def test_the_systems_runtime_replaces_one_without_lse(machine: Machine) -> None:
    choice = machine.choose()
    assert choice.library == str(machine.system)
    assert not choice.is_problem


def test_torchs_own_stays_where_it_has_lse(machine: Machine) -> None:
    machine.lse[machine.bundled] = 40
    assert machine.choose() == (None, "torch's OpenMP runtime has LSE atomics", False)


def test_nothing_is_replaced_on_a_cpu_without_lse(machine: Machine) -> None:
    assert machine.choose(has_lse=False).library is None


def test_the_switch_and_the_users_runtime_win(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = machine.choose("/opt/libomp.so.5")
    assert choice.library is None
    assert "/opt/libomp.so.5" in choice.reason
    monkeypatch.setenv("VLLM_ARM_OPENMP", "0")
    assert machine.choose() == (None, "VLLM_ARM_OPENMP=0", False)


def test_a_system_without_a_better_one_is_a_problem(machine: Machine) -> None:
    machine.lse[machine.system] = 0
    choice = machine.choose()
    assert choice.is_problem
    assert "no LSE atomics either" in choice.reason
    machine.system.unlink()
    choice = machine.choose()
    assert choice.is_problem
    assert "libgomp1" in choice.reason


def test_an_older_interface_is_passed_over(machine: Machine) -> None:
    machine.bundled.write_bytes(NEW)
    machine.system.write_bytes(OLD)
    choice = machine.choose()
    assert choice.library is None
    assert "lacks GOMP_5.0.1" in choice.reason


def test_a_renamed_copy_of_torch_cannot_be_replaced(machine: Machine) -> None:
    renamed = machine.bundled.with_name("libgomp-0123abcd.so.1")
    machine.bundled.rename(renamed)
    machine.lse[renamed] = 0
    choice = machine.choose()
    assert choice.library is None
    assert "mapped beside" in choice.reason


def test_copies_get_the_runtime_under_their_names(machine: Machine, tmp_path: Path) -> None:
    copy = machine.site / "sentencepiece.libs/libgomp-6a29.so.1.0.0"
    newer = machine.site / "other.libs/libgomp-ffff.so.1.0.0"
    for file, content in ((copy, OLD), (newer, NEW + b"GOMP_9.9\0")):
        file.parent.mkdir()
        file.write_bytes(content)
    copies = openmp.bundled_copies(machine.site)
    assert copies == [newer, copy]
    for _ in range(2):
        folder = openmp.link_as(machine.system, copies, tmp_path / "cache")
        assert folder is not None
        assert [link.name for link in folder.iterdir()] == [copy.name], "what the runtime cannot replace stays itself"
        assert (folder / copy.name).resolve() == machine.system
    assert openmp.link_as(machine.system, [], tmp_path / "cache") is None


def test_a_folder_that_cannot_be_written_is_an_error(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    copy = machine.site / "x.libs/libgomp-1.so"
    copy.parent.mkdir()
    copy.write_bytes(OLD)
    with pytest.raises(OSError, match="cache"):
        openmp.link_as(machine.system, [copy], tmp_path / "cache")
