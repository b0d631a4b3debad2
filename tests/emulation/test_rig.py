# SPDX-License-Identifier: Apache-2.0
"""The emulated server is the Arm machine it claims to be, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.emulation.cpu_models import CPU_MODELS
from tests.emulation.guest import ArmRoot
from tests.emulation.launcher import Bind

# Prints what a program can learn of the processor: auxiliary vector, SVE length, /sys, /proc.
PROBE = """
import ctypes, json, os, platform
from pathlib import Path
libc = ctypes.CDLL(None)
libc.getauxval.restype = ctypes.c_ulong
hwcap, hwcap2 = libc.getauxval(16), libc.getauxval(26)
vector = libc.prctl(51, 0, 0, 0, 0)
cpu = "/sys/devices/system/cpu/cpu0"
print(json.dumps({
    "machine": platform.machine(),
    "dotprod": bool(hwcap >> 20 & 1),
    "sve": bool(hwcap >> 22 & 1),
    "i8mm": bool(hwcap2 >> 13 & 1),
    "bf16": bool(hwcap2 >> 14 & 1),
    "sve_bits": (vector & 0xFFFF) * 8 if vector > 0 else 0,
    "midr": int(Path(f"{cpu}/regs/identification/midr_el1").read_text(), 16),
    "features": Path("/proc/cpuinfo").read_text().split("Features\\t: ")[1].split("\\n")[0].split(),
    "nodes": Path("/sys/devices/system/node/online").read_text().strip(),
    "cpus": os.sched_getaffinity(0) == set(range(os.cpu_count())),
}))
"""
SLEEP = 300
# Long enough for a loaded machine; each is a bound, not a wait.
PATIENCE = 60


def probe(root: ArmRoot, **options: object) -> dict[str, object]:
    """The guest's view of itself."""
    done = root.run(["python3.13", "-c", PROBE], timeout=PATIENCE, **options)  # type: ignore[arg-type]
    view: dict[str, object] = json.loads(done.stdout)
    return view


def wait_until(condition: object, what: str) -> None:
    """Poll `condition()` until it holds; the test fails after PATIENCE."""
    limit = time.monotonic() + PATIENCE
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < limit, f"still waiting: {what}"
        time.sleep(0.05)


def processes_with(text: str) -> list[int]:
    """Host processes whose command line holds `text`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("name", CPU_MODELS)
def test_guest_has_the_features_of_its_cpu_model(arm_root: ArmRoot, name: str) -> None:
    model, seen = CPU_MODELS[name], probe(arm_root, cpu=name)
    has_matrix = name != "n1"
    assert seen["machine"] == "aarch64"
    assert seen["dotprod"] is True
    assert (seen["i8mm"], seen["bf16"]) == (has_matrix, has_matrix)
    assert (seen["sve"], seen["sve_bits"]) == (model.sve_bits > 0, model.sve_bits)
    assert seen["midr"] == model.midr
    features = seen["features"]
    assert isinstance(features, list)
    assert ("bf16" in features, "sve" in features) == (has_matrix, model.sve_bits > 0)


def test_topology_and_identity_can_be_chosen(arm_root: ArmRoot) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two NUMA nodes need two CPUs")
    seen = probe(arm_root, nodes=2, midr=0x410FD490)
    assert (seen["nodes"], seen["midr"]) == ("0-1", 0x410FD490)
    lscpu = arm_root.run(["lscpu", "-J", "-e=CPU,CORE,NODE"], nodes=2).stdout
    assert {cpu["node"] for cpu in json.loads(lscpu)["cpus"]} == {0, 1}


def test_output_status_and_environment(arm_root: ArmRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ARM_LEAK", "1")
    script = 'echo "$GREETING/$VLLM_ARM_LEAK"; pwd; echo problem >&2; exit 3'
    done = arm_root.run(["sh", "-c", script], env={"GREETING": "hello"}, cwd="/tmp", check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("hello/\n/tmp\n", "problem\n", 3)


def test_failures_are_reported(arm_root: ArmRoot) -> None:
    killed = arm_root.run(["sh", "-c", "kill -ILL $$"], check=False)
    assert killed.returncode == 128 + signal.SIGILL
    missing = arm_root.run(["no-such-command"], check=False)
    assert missing.returncode == 125
    assert missing.stderr == "arm guest: no-such-command: No such file or directory\n"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        arm_root.run(["sh", "-c", "echo the reason >&2; false"])
    assert "the reason" in caught.value.__notes__[0]


def test_binds_and_the_pristine_root(arm_root: ArmRoot, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("from the host")
    binds = [
        Bind(host=str(tmp_path), guest="/opt/data", read_only=False),
        Bind(host=str(tmp_path / "in"), guest="/opt/one/file", read_only=True),
    ]
    script = """
    cat /opt/one/file; echo from the guest > /opt/data/out; echo lost > /opt/scratch
    echo changed 2>/dev/null > /opt/one/file && echo writable
    """
    done = arm_root.run(["sh", "-c", script], binds=binds, check=False)
    assert done.stdout == "from the host"
    assert (tmp_path / "out").read_text() == "from the guest\n"
    assert arm_root.run(["ls", "/opt"]).stdout.split() == ["project"]


def test_shared_memory_has_the_size_asked_for(arm_root: ArmRoot) -> None:
    script = "import os; s = os.statvfs('/dev/shm'); print(s.f_blocks * s.f_frsize >> 20)"
    done = arm_root.run(["python3.13", "-c", script], shm_size="64m")
    assert done.stdout == "64\n"


def test_nothing_stays_mounted_or_registered_on_the_host(arm_root: ArmRoot) -> None:
    def host_state() -> tuple[str, list[str], list[str]]:
        mounts = Path("/proc/self/mountinfo").read_text()
        handlers = sorted(os.listdir("/proc/sys/fs/binfmt_misc"))
        return mounts, handlers, sorted(os.listdir("/dev/shm"))

    before = host_state()
    server = arm_root.popen(["sleep", str(SLEEP)])
    wait_until(lambda: processes_with(f"/bin/sleep\0sleep\0{SLEEP}"), "the guest's start")
    assert host_state() == before
    server.kill()
    server.wait()
    assert host_state() == before


# A guest with a child in a session of its own, as servers make them; it says when it is there.
FAMILY = "setsid sleep {mark} & trap 'exit 7' TERM; echo ready; sleep {mark} & wait"


def start_family(root: ArmRoot, mark: str) -> subprocess.Popen[str]:
    """Start FAMILY, whose processes carry `mark` (a number), and wait for it."""
    process = root.popen(["bash", "-c", FAMILY.format(mark=mark)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert processes_with(mark)
    return process


def test_terminate_reaches_the_command_and_its_family_ends(arm_root: ArmRoot) -> None:
    process = start_family(arm_root, "311.5")
    process.terminate()
    assert process.wait(PATIENCE) == 7
    wait_until(lambda: not processes_with("311.5"), "the end of the guest's processes")


def test_kill_ends_the_whole_guest(arm_root: ArmRoot) -> None:
    process = start_family(arm_root, "312.5")
    process.kill()
    process.wait(PATIENCE)
    wait_until(lambda: not processes_with("312.5"), "the end of the guest's processes")


def test_a_timeout_ends_the_whole_guest(arm_root: ArmRoot) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        arm_root.run(["sh", "-c", "setsid sleep 313.5 & sleep 313.5"], timeout=2)
    wait_until(lambda: not processes_with("313.5"), "the end of the guest's processes")


OWNER = """
import sys
from pathlib import Path
from tests.emulation.guest import ArmRoot
guest = ArmRoot(Path(sys.argv[1])).popen(["sleep", "314.5"])
guest.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_guest_does_not_outlive_its_owner(arm_root: ArmRoot, number: int) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(arm_root.path)])
    wait_until(lambda: processes_with("/bin/sleep\0sleep\000314.5"), "the guest's start")
    owner.send_signal(number)
    owner.wait(PATIENCE)
    wait_until(lambda: not processes_with("/bin/sleep\0sleep\000314.5"), "the end of the guest's processes")


def test_command_line_runs_and_ends_by_a_signal(arm_root: ArmRoot) -> None:
    command = [sys.executable, "-m", "tests.emulation", "run", "--cpu", "n1", "--env", "X=1", "--"]
    cache = ["--cache", str(arm_root.path.parent)]
    command[4:4] = cache
    said = subprocess.run(
        [*command, "sh", "-c", "uname -m; echo $X $QEMU_CPU; exit 4"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (said.stdout, said.returncode) == ("aarch64\n1 neoverse-n1\n", 4)
    process = subprocess.Popen([*command, "sleep", "315.5"])
    wait_until(lambda: processes_with("/bin/sleep\0sleep\000315.5"), "the guest's start")
    process.terminate()
    assert process.wait(PATIENCE) == 128 + signal.SIGTERM


def test_bytecode_was_made_on_the_host(arm_root: ArmRoot) -> None:
    """The interpreter takes it as up to date, and it names the sources where the guest has them."""
    script = """
import importlib
from importlib.machinery import SourceFileLoader
def never(*_arguments, **_options): raise AssertionError("compiled in the guest")
SourceFileLoader.source_to_code = never
import packaging.version, json.tool, torch.version
print(packaging.version.parse.__code__.co_filename, packaging.version.__cached__)
"""
    seen = arm_root.run(["python3.13", "-c", script], timeout=2 * PATIENCE).stdout.split()
    folder = "/usr/lib/python3/dist-packages/packaging"
    assert seen == [f"{folder}/version.py", f"{folder}/__pycache__/version.cpython-313.pyc"]


CROSS_PROGRAM = """
#include <Python.h>
#include <iostream>
#include <string>
int main() {
  std::string text = "Python " + std::to_string(PY_MAJOR_VERSION) + "." + std::to_string(PY_MINOR_VERSION);
  std::cout << text << std::endl;
}
"""


def test_the_root_is_a_sysroot(arm_root: ArmRoot, tmp_path: Path) -> None:
    compiler = shutil.which("clang++-19") or shutil.which("clang++")
    if compiler is None or shutil.which("ld.lld-19") is None:
        pytest.skip("no clang and lld 19 on this machine")
    source, program = tmp_path / "program.cpp", tmp_path / "program"
    source.write_text(CROSS_PROGRAM)
    command = [compiler, "--target=aarch64-linux-gnu", f"--sysroot={arm_root.path}", "-fuse-ld=lld-19"]
    command += ["-std=c++20", f"-I{arm_root.path}/usr/include/python3.13", str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    bind = Bind(host=str(tmp_path), guest="/opt/built", read_only=True)
    assert arm_root.run(["/opt/built/program"], binds=[bind]).stdout == "Python 3.13\n"


def test_numpy_and_torch_compute(arm_root: ArmRoot) -> None:
    numpy = "import numpy; print(numpy.arange(10).sum())"
    assert arm_root.run(["python3.13", "-c", numpy], timeout=PATIENCE).stdout == "45\n"
    script = """
import torch
a = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64) / 4096
for kind in (torch.float32, torch.bfloat16):
    torch.testing.assert_close((a.to(kind) @ a.to(kind)).double(), a.double() @ a.double(),
                               rtol=2e-2, atol=1e-2)
assert not torch.cuda.is_available()
print("close")
"""
    done = arm_root.run(["python3.13", "-c", script], timeout=5 * PATIENCE)
    assert done.stdout == "close\n"
