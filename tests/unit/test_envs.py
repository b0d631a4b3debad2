# SPDX-License-Identifier: Apache-2.0
"""The VLLM_ARM_* variables, and where vllm-arm acts."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_arm import activation, envs

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("ON", True), ("0", False), ("no", False)])
def test_booleans(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("VLLM_ARM_MIMALLOC", text)
    assert envs.VLLM_ARM_MIMALLOC is value


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in envs.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert (envs.VLLM_ARM_FORCE, envs.VLLM_ARM_STRICT, envs.VLLM_ARM_ISA) == (False, False, None)
    assert all(getattr(envs, name) is True for name in envs.switches())
    monkeypatch.setenv("VLLM_ARM_NORM", "")
    assert envs.VLLM_ARM_NORM is True, "an empty variable is an unset one"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("VLLM_ARM_MIMALLOC", "maybe", r"VLLM_ARM_MIMALLOC='maybe': expected 0 or 1"),
        ("VLLM_ARM_COLLECTIVE_TIMEOUT", "0", r"VLLM_ARM_COLLECTIVE_TIMEOUT='0': expected a number of seconds above 0"),
        ("VLLM_ARM_COLLECTIVE_TIMEOUT", "5m", r"VLLM_ARM_COLLECTIVE_TIMEOUT='5m': expected a number of seconds"),
        ("VLLM_ARM_ISA", "avx2", r"VLLM_ARM_ISA='avx2': expected one of portable, neon, bf16, sve"),
    ],
)
def test_a_bad_value_names_the_variable(monkeypatch: pytest.MonkeyPatch, name: str, text: str, expected: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=expected):
        envs.validate()


def test_an_unknown_variable_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="VLLM_ARM_TYPO"):
        _ = envs.VLLM_ARM_TYPO


@pytest.mark.parametrize(
    ("system", "machine", "force", "expected"),
    [
        ("linux", "aarch64", "", True),
        ("linux", "aarch64", "0", True),
        ("linux", "x86_64", "", False),
        ("linux", "x86_64", "1", True),
        ("darwin", "arm64", "", False),
    ],
)
def test_where_it_is_active(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, force: str, expected: bool
) -> None:
    monkeypatch.setattr(activation.sys, "platform", system)
    monkeypatch.setattr(activation.os, "uname", lambda: SimpleNamespace(machine=machine))
    monkeypatch.setenv("VLLM_ARM_FORCE", force)
    assert activation.is_active() is expected


def test_the_package_and_its_plugin_import_nothing_heavy() -> None:
    code = (
        "import sys; before = set(sys.modules); import vllm_arm.plugin; vllm_arm.plugin.platform();"
        "print(' '.join(set(sys.modules) - before))"
    )
    environment = {**os.environ, "VLLM_ARM_FORCE": "0"}
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=PROJECT, env=environment, capture_output=True, text=True, check=True
    )
    loaded = set(result.stdout.split())
    assert not loaded & {"torch", "vllm", "numpy", "rich", "click", "unidiff"}
