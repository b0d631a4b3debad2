# SPDX-License-Identifier: Apache-2.0
"""What the launcher is ordered to do, without launching."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.emulation import __main__ as command_line
from tests.emulation.guest import ArmRoot, parse_bind, parse_env, write_spec
from tests.emulation.launcher import Bind, exit_code
from tests.emulation.qemu import handler_is_registered


def test_only_the_chosen_environment_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setattr("tests.emulation.guest.handler_line", lambda: None)
    spec = ArmRoot(Path("/r")).launch_spec(["true"], cpu="n1", env={"VLLM_X": "1", "LANG": "C"})
    assert "SECRET" not in spec["env"]
    assert (spec["env"]["VLLM_X"], spec["env"]["LANG"]) == ("1", "C")
    assert spec["env"]["QEMU_CPU"] == "neoverse-n1"
    # Either would keep vLLM from loading a platform plugin.
    assert not {"VLLM_TARGET_DEVICE", "VLLM_PLUGINS"} & spec["env"].keys()


def test_environment_items() -> None:
    host = {"TAKEN": "from host", "OTHER": "no"}
    assert parse_env(["A=1", "B=x=y", "C=", "TAKEN", "ABSENT"], host) == {
        "A": "1",
        "B": "x=y",
        "C": "",
        "TAKEN": "from host",
    }
    with pytest.raises(ValueError, match=r"--env: expected NAME=VALUE or NAME, found '=1'"):
        parse_env(["=1"], host)


def test_binds(tmp_path: Path) -> None:
    assert parse_bind(f"{tmp_path}:/opt/x:ro") == Bind(host=str(tmp_path), guest="/opt/x", read_only=True)
    assert parse_bind(f"{tmp_path}:/opt/x")["read_only"] is False
    for bad in (str(tmp_path), f"{tmp_path}:relative", f"{tmp_path}:/x:rw", f"{tmp_path}:/../x"):
        with pytest.raises(ValueError, match="--bind: expected HOST:/GUEST or HOST:/GUEST:ro"):
            parse_bind(bad)
    with pytest.raises(ValueError, match=r"--bind: .*/absent does not exist"):
        parse_bind(f"{tmp_path}/absent:/x")


def test_the_local_site_comes_below_other_binds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.emulation.guest.handler_line", lambda: None)
    bind = Bind(host="/x", guest="/usr/local/share/x", read_only=True)
    root = ArmRoot(Path("/r"), usr_local=tmp_path / "usr-local", binds=[bind])
    assert [b["guest"] for b in root.launch_spec(["true"])["binds"]] == [
        "/usr/local",
        "/usr/local/share/x",
    ]


def test_orders_go_through_an_anonymous_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.emulation.guest.handler_line", lambda: None)
    spec = ArmRoot(Path("/r")).launch_spec(["echo", Path("/a")])
    with os.fdopen(write_spec(spec)) as file:
        assert json.load(file) == spec
    assert spec["argv"] == ["echo", "/a"]


def test_exit_codes_are_the_shells() -> None:
    assert [exit_code(status) for status in (0, 3 << 8, 9)] == [0, 3, 137]


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("enabled\ninterpreter /usr/bin/qemu\nflags: POF\n", True),
        ("enabled\ninterpreter /usr/bin/qemu\nflags: PO\n", False),
        ("disabled\ninterpreter /usr/bin/qemu\nflags: POF\n", False),
        (None, False),
    ],
)
def test_handlers_of_the_host(tmp_path: Path, text: str | None, usable: bool) -> None:
    if text is not None:
        (tmp_path / "qemu-aarch64").write_text(text)
    assert handler_is_registered(tmp_path) is usable


def test_command_line_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.emulation.rig.qemu_version", lambda: "QEMU")
    cache = ["--cache", str(tmp_path)]
    assert command_line.main(["root-path", *cache]) == 2
    assert "is not built yet: run `python -m tests.emulation make-root`" in capsys.readouterr().err
    assert command_line.main(["install", *cache, "absent.whl"]) == 2
    assert capsys.readouterr().err == "arm root: wheel: absent.whl does not exist\n"
    monkeypatch.setattr("tests.emulation.rig.missing_prerequisites", lambda: "missing packages: x")
    assert command_line.main(["make-root", *cache]) == 2
    assert capsys.readouterr().err == "arm root: missing packages: x\n"
