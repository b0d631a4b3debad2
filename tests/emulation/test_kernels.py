# SPDX-License-Identifier: Apache-2.0
"""The aarch64 build: the C++ kernel tests under every CPU model, the ops from Python, and what doctor says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulation.conftest import GUEST_TESTS, REPOSITORY
from tests.emulation.cpu_models import CPU_MODELS, CpuModel
from tests.emulation.guest import ArmRoot
from tests.emulation.qemu import find_qemu

RUNNABLE = {"n1": ["portable", "neon"], "neon": ["portable", "neon", "bf16"]}
EVERY_VARIANT = ["portable", "neon", "bf16", "sve"]
VARIANTS = ["portable", "neon", "bf16"]
"""Those of rms_norm."""


@pytest.fixture(scope="session")
def kernel_tests(arm_root: ArmRoot) -> Path:
    """The C++ tests, linked statically: QEMU runs them in seconds, without the guest."""
    build = REPOSITORY / "build/aarch64-tests"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in (
        [
            *("cmake", "-S", str(REPOSITORY), "-B", str(build), "-G", "Ninja"),
            f"-DCMAKE_TOOLCHAIN_FILE={REPOSITORY}/cmake/aarch64-clang.cmake",
            f"-DVLLM_ARM_SYSROOT={arm_root.path}",
            *("-DVLLM_ARM_BUILD_PYTHON=OFF", "-DVLLM_ARM_BUILD_TESTS=ON", "-DVLLM_ARM_STATIC_TESTS=ON"),
        ],
        ["cmake", "--build", str(build)],
    ):
        done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "tests/cpp/kernel_tests"


@pytest.mark.parametrize("model", CPU_MODELS.values(), ids=CPU_MODELS.keys())
def test_cpp_kernels(kernel_tests: Path, model: CpuModel) -> None:
    qemu = find_qemu()
    assert qemu is not None
    done = subprocess.run(
        [qemu, "-cpu", model.qemu_cpu, str(kernel_tests)], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Status: SUCCESS!" in done.stdout


def test_ops_from_python(arm_server: ArmRoot) -> None:
    tests = [f"{GUEST_TESTS}/kernels", f"{GUEST_TESTS}/unit/test_host.py"]
    done = arm_server.run(
        # Forced variants have a test of their own below, which does not import torch again for each.
        [
            *("python3.13", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"),
            *("-k", "not forc"),
            *tests,
        ],
        cpu="n1",
        env={"HYPOTHESIS_STORAGE_DIRECTORY": "/tmp/hypothesis"},
        cwd="/tmp",
        timeout=900,
    )
    assert " passed" in done.stdout
    assert "failed" not in done.stdout


def test_collectives_between_processes(arm_server: ArmRoot) -> None:
    """Ranks share memory and wait for each other: QEMU runs each on a core of the host."""
    done = arm_server.run(
        [
            *("python3.13", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"),
            *("-k", "(same_bits and 2) or ring or (random_order and 700) or (killed and 5) or silence"),
            *(f"{GUEST_TESTS}/collectives/test_operations.py", f"{GUEST_TESTS}/collectives/test_failures.py"),
        ],
        cpu="v2",
        cwd="/opt/project",
        timeout=900,
    )
    assert "5 passed" in done.stdout
    assert "failed" not in done.stdout


@pytest.mark.parametrize("name", CPU_MODELS)
def test_doctor(arm_server: ArmRoot, name: str) -> None:
    model = CPU_MODELS[name]
    done = arm_server.run(["vllm-arm", "doctor", "--json"], cpu=name, timeout=600)
    report = json.loads(done.stdout)
    checks = {(check["section"], check["name"]): check for check in report["checks"]}
    assert report["ok"]
    assert checks["Package", "vllm-arm"]["value"].endswith(", active")
    cores = {"n1": "Neoverse N1", "v1": "Neoverse V1", "v2": "Neoverse V2", "neon": "other"}
    assert checks["CPU", "core"]["value"] == cores[name]
    assert checks["Kernels", "rms_norm"]["value"] == RUNNABLE.get(name, VARIANTS)[-1]
    assert checks["Linear layers", "oneDNN"]["value"].startswith("3.")
    ours = f"vllm_arm, panel_linear {RUNNABLE.get(name, VARIANTS)[-1]}"
    for scheme in ("bfloat16", "int8"):
        assert checks["Linear layers", f"{scheme}, 4096 x 4096"]["value"] == ours
    if model.sve_bits:
        assert checks["CPU", "SVE vector"]["value"] == f"{model.sve_bits} bits"
    else:
        assert ("CPU", "SVE vector") not in checks
    # torch's wheel brings a libgomp without LSE atomics; Debian's has them.
    assert checks["OpenMP", "runtime"]["value"] == "/usr/lib/aarch64-linux-gnu/libgomp.so.1.0.0"
    assert "LSE" in checks["OpenMP", "runtime"]["reason"]
    assert "libmimalloc.so" in checks["Allocator", "EngineCore and workers"]["value"]
    assert {check["value"] for (section, _), check in checks.items() if section == "Patches"} == {"pending"}


@pytest.mark.parametrize("name", CPU_MODELS)
def test_forced_variants(arm_server: ArmRoot, name: str) -> None:
    code = (
        "from vllm_arm import _host\n"
        f"for isa in {EVERY_VARIANT}:\n"
        "    try: print(isa, _host.select_isa(list(_host.operations()['rms_norm']), _host.host_features(), isa))\n"
        "    except ValueError as error: print(error)\n"
    )
    lines = arm_server.run(["python3.13", "-c", code], cpu=name, timeout=120).stdout.splitlines()
    runnable = RUNNABLE.get(name, EVERY_VARIANT)
    for isa, line in zip(EVERY_VARIANT, lines, strict=True):
        if isa in runnable:
            assert line == f"{isa} {isa if isa in VARIANTS else VARIANTS[-1]}"
        else:
            assert line.startswith(f"VLLM_ARM_ISA={isa}: this CPU lacks ")
