# SPDX-License-Identifier: Apache-2.0
"""Fixtures: the emulated Arm server, bare and with the cross-built wheel installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.emulation.guest import ArmRoot
from tests.emulation.install import install_wheels
from tests.emulation.launcher import Bind
from tests.emulation.recipe import missing_prerequisites
from tests.emulation.rig import make_root

REPOSITORY = Path(__file__).resolve().parents[2]
# Set by `make test-arm`: there a machine that cannot emulate is a failure, not a reason to skip.
REQUIRE_VARIABLE = "VLLM_ARM_REQUIRE_EMULATION"
WHEEL_VARIABLE = "VLLM_ARM_AARCH64_WHEEL"
GUEST_TESTS = "/opt/project/tests"


def give_up(reason: str) -> None:
    """Skip with the reason, or fail where emulation is required."""
    if os.environ.get(REQUIRE_VARIABLE) == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def arm_root() -> ArmRoot:
    """The emulated server without vllm-arm; the repository's tests are at /opt/project/tests."""
    if missing := missing_prerequisites():
        give_up(missing)
    tests = Bind(host=str(REPOSITORY / "tests"), guest=GUEST_TESTS, read_only=True)
    return ArmRoot(make_root(), binds=[tests])


@pytest.fixture(scope="session")
def arm_wheel() -> Path:
    """The cross-built wheel: named by VLLM_ARM_AARCH64_WHEEL, else built by `make cross-wheel`."""
    if named := os.environ.get(WHEEL_VARIABLE):
        wheel = (REPOSITORY / named).resolve()
        if not wheel.is_file():
            pytest.fail(f"{WHEEL_VARIABLE}: {wheel} does not exist", pytrace=False)
        return wheel
    subprocess.run(["make", "cross-wheel"], cwd=REPOSITORY, check=True)
    (wheel,) = (REPOSITORY / "build" / "aarch64").glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def arm_server(arm_root: ArmRoot, arm_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> ArmRoot:
    """The emulated server with vllm-arm installed, and a vLLM cache that lasts for the session."""
    base = tmp_path_factory.mktemp("arm-server")
    install_wheels([arm_wheel], base / "usr-local")
    (base / "vllm-cache").mkdir()
    cache = Bind(host=str(base / "vllm-cache"), guest="/root/.cache/vllm", read_only=False)
    return ArmRoot(arm_root.path, base / "usr-local", [*arm_root.binds, cache])
