# SPDX-License-Identifier: Apache-2.0
"""A wheel is installed as pip would install it on the server itself."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.emulation.guest import ArmRoot
from tests.emulation.install import install_wheels

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: {tag}\n"


def write_wheel(directory: Path, files: dict[str, str], name: str = "sample", tag: str = "py3-none-any") -> Path:
    """A wheel that holds `files`; `{info}` in a path stands for its dist-info folder."""
    info = f"{name}-1.0.dist-info"
    contents = {path.replace("{info}", info): text for path, text in files.items()}
    contents[f"{info}/METADATA"] = METADATA.format(name=name)
    contents[f"{info}/WHEEL"] = WHEEL.format(tag=tag)
    contents[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*contents, f"{info}/RECORD"))
    wheel = directory / f"{name}-1.0-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)
    return wheel


def test_start_up_file_entry_points_and_scripts_work(arm_root: ArmRoot, tmp_path: Path) -> None:
    wheel = write_wheel(
        tmp_path,
        {
            "sample/__init__.py": "def main():\n    print('started')\n    return 5\n",
            "sample.pth": "import sys; sys.from_start_up_file = True\n",
            "{info}/entry_points.txt": (
                "[console_scripts]\nsample-tool = sample:main\n[some.plugins]\nsample = sample:x\n"
            ),
        },
        tag="cp313-cp313-linux_aarch64",
    )
    install_wheels([wheel], tmp_path / "usr-local")
    server = ArmRoot(arm_root.path, tmp_path / "usr-local")
    tool = server.run(["sample-tool"], check=False)
    assert (tool.stdout, tool.returncode) == ("started\n", 5)
    script = """
import sys, sample
from importlib.metadata import entry_points, version
print(sys.from_start_up_file, version("sample"), [e.name for e in entry_points(group="some.plugins")])
print(sample.__file__)
"""
    assert server.run(["python3.13", "-c", script]).stdout.splitlines() == [
        "True 1.0 ['sample']",
        "/usr/local/lib/python3.13/dist-packages/sample/__init__.py",
    ]


def test_installing_again_replaces_what_was_there(arm_root: ArmRoot, tmp_path: Path) -> None:
    usr_local = tmp_path / "usr-local"
    install_wheels([write_wheel(tmp_path, {"old.py": ""}, name="old")], usr_local)
    install_wheels([write_wheel(tmp_path, {"new.py": ""}, name="new")], usr_local)
    server = ArmRoot(arm_root.path, usr_local)
    script = "from importlib.util import find_spec as f; print(f('old'), bool(f('new')))"
    assert server.run(["python3.13", "-c", script]).stdout == "None True\n"


@pytest.mark.parametrize("tag", ["cp313-cp313-linux_x86_64", "cp311-cp311-linux_aarch64"])
def test_a_wheel_for_another_machine_is_refused(tmp_path: Path, tag: str) -> None:
    wheel = write_wheel(tmp_path, {"sample.py": ""}, tag=tag)
    with pytest.raises(RuntimeError, match="not a supported wheel"):
        install_wheels([wheel], tmp_path / "usr-local")


def test_a_missing_wheel_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"wheel: .*absent\.whl does not exist"):
        install_wheels([tmp_path / "absent.whl"], tmp_path / "usr-local")


def test_vllm_command_is_on_the_path(arm_root: ArmRoot) -> None:
    assert arm_root.run(["sh", "-c", "command -v vllm"]).stdout == "/usr/bin/vllm\n"
