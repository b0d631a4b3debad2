# SPDX-License-Identifier: Apache-2.0
"""vllm-arm doctor and vllm-arm patches."""

import json
import sys

import pytest
from click.testing import CliRunner, Result

from vllm_arm import envs
from vllm_arm.cli import doctor
from vllm_arm.cli.main import main
from vllm_arm.runtime import allocator


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in envs.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_ARM_FORCE", "1")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    # As in a process of its own: doctor says so where vLLM was imported unpatched, as other tests do.
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)


def checks() -> dict[tuple[str, str], dict[str, str]]:
    report = json.loads(run("doctor", "--json").output)
    return {(check["section"], check["name"]): check for check in report["checks"]}


def test_a_sound_machine_passes() -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    for word in ("rms_norm", "mimalloc", "libgomp", "node 0", "/dev/shm", "transparent huge pages", "0001-"):
        assert word in result.output


def test_json_has_every_section_and_switch() -> None:
    found = checks()
    assert {section for section, _ in found} == {
        "Package",
        "CPU",
        "Kernels",
        "Linear layers",
        "Allocator",
        "OpenMP",
        "NUMA and binding",
        "Collectives",
        "Memory",
        "Patches",
        "Switches",
    }
    assert {name for section, name in found if section == "Switches"} == set(envs.VARIABLES)
    assert found["Package", "vLLM"]["status"] == "ok"


def test_a_variant_that_the_cpu_lacks_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ARM_ISA", "avx")
    result = run("doctor", "--json")
    assert result.exit_code == 1
    broken = [check for check in json.loads(result.output)["checks"] if check["status"] == "broken"]
    assert any("VLLM_ARM_ISA='avx': expected one of portable, neon, bf16, sve" in check["value"] for check in broken)


def test_a_missing_allocator_is_a_warning_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "find_mimalloc", lambda: None)
    check = checks()["Allocator", "EngineCore and workers"]
    assert check["status"] == "warning"
    assert "pip install cmeel-mimalloc" in check["reason"]


def test_switched_off_is_shown_as_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in envs.switches():
        monkeypatch.setenv(name, "0")
    found = checks()
    assert all(found["Switches", name]["status"] == "off" for name in envs.switches())
    for key in (
        ("Allocator", "EngineCore and workers"),
        ("NUMA and binding", "threads"),
        ("Kernels", "RMSNorm, eager"),
        ("Kernels", "attention"),
        ("Collectives", "ranks of a host"),
    ):
        assert found[key]["status"] == "off", key
    assert {check["value"] for (section, _), check in found.items() if section == "Patches"} == {"off"}


def test_the_plan_for_more_ranks_is_shown() -> None:
    output = run("doctor", "--tp", "2").output
    for word in ("rank 0", "rank 1", "shared memory, 8 MiB for each rank", "silent for 300 s"):
        assert word in output


def test_too_many_ranks_are_broken_and_named() -> None:
    result = run("doctor", "--json", "--tp", "4096")
    assert result.exit_code == 1
    assert run("doctor", "--tp", "0").exit_code == 2


def test_a_section_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[doctor.Check]:
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "_cpu", fail)
    result = run("doctor")
    assert result.exit_code == 1
    assert "no such device" in result.output
    assert "libgomp" in result.output


def test_inactive_on_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_arm.activation.is_active", lambda: False)
    found = checks()
    assert found["Package", "vllm-arm"]["status"] == "off"
    assert found["Allocator", "EngineCore and workers"]["status"] == "off"


def test_patches_lists_the_series() -> None:
    result = run("patches")
    assert result.exit_code == 0
    assert "0001-" in result.output
    assert "==0.32.*" in result.output
