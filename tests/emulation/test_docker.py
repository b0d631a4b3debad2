# SPDX-License-Identifier: Apache-2.0
"""The steps of docker/Dockerfile's runtime stage, run on the emulated Arm server, for want of a Docker engine."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

import vllm_arm
from tests.emulation.conftest import REPOSITORY
from tests.emulation.guest import ArmRoot
from tests.emulation.test_serve import GUEST_MODEL, emulated_server

Instruction = dict[str, str]


@pytest.fixture(scope="module")
def runtime() -> list[Instruction]:
    """The instructions of the last stage."""
    structure = DockerfileParser(str(REPOSITORY / "docker/Dockerfile")).structure
    starts = [index for index, step in enumerate(structure) if step["instruction"] == "FROM"]
    assert structure[starts[-1]]["value"].endswith("AS runtime")
    return [step for step in structure[starts[-1] + 1 :] if step["instruction"] != "COMMENT"]


def values(stage: list[Instruction], instruction: str) -> list[str]:
    return [step["value"] for step in stage if step["instruction"] == instruction]


def commands(stage: list[Instruction], name: str) -> list[str]:
    """The shell commands of the stage's RUN steps that begin with ``name``."""
    every = [command.strip() for step in values(stage, "RUN") for command in step.split("&&")]
    return [command for command in every if command.startswith(name)]


def test_the_system_packages_exist(runtime: list[Instruction], arm_root: ArmRoot) -> None:
    (step,) = commands(runtime, "apt-get install")
    packages = [word for word in step.split()[2:] if not word.startswith("-")]
    known = subprocess.run(["apt-cache", "pkgnames"], capture_output=True, text=True, check=True).stdout.split()
    assert set(packages) <= set(known)
    # What vLLM and torch load at run time is in the server that the other tests run on.
    for package, library in (("libgomp1", "libgomp.so.1"), ("libnuma1", "libnuma.so.1")):
        assert package in packages
        assert list(arm_root.path.glob(f"usr/lib/aarch64-linux-gnu/{library}"))


def test_the_python_packages_are_those_of_the_server(runtime: list[Instruction]) -> None:
    steps = commands(runtime, "pip install")
    pinned = re.findall(r"-r /opt/requirements/(\S+)", steps[0])
    assert pinned == ["core.txt", "vllm.txt"]
    assert all((REPOSITORY / "requirements" / name).is_file() for name in pinned)
    assert steps[1].endswith("--no-deps /opt/wheels/*.whl")


def test_it_serves_as_a_user_and_is_healthy(runtime: list[Instruction], arm_server: ArmRoot, tmp_path: Path) -> None:
    (useradd,) = commands(runtime, "useradd")
    (user,) = values(runtime, "USER")
    (directory,) = values(runtime, "WORKDIR")
    (port,) = values(runtime, "EXPOSE")
    entry_point = json.loads(values(runtime, "ENTRYPOINT")[0])
    health = json.loads(values(runtime, "HEALTHCHECK")[0].rpartition("CMD")[2])
    user_id, group_id = user.split(":")
    assert f"--uid {user_id} " in useradd, "the user that is made is the one that runs"

    as_user = f"setpriv --reuid={user_id} --regid={group_id} --clear-groups env HOME={directory}"
    log = tmp_path / "server.log"
    steps = f'PATH=$PATH:/usr/sbin; {useradd}; cd {directory}; {as_user} vllm-arm doctor; exec {as_user} "$@"'
    prologue = ["sh", "-ec", steps, "entrypoint"]
    with emulated_server(arm_server, log, cpu="v2", command=[*prologue, *entry_point]) as url:
        served_port = url.rpartition(":")[2]
        assert any(f":{port}/" in part for part in health), "the health check asks the port that is exposed"
        check = [part.replace(f":{port}/", f":{served_port}/") for part in health]
        assert arm_server.run(check, timeout=120).returncode == 0
        closed = [part.replace(f":{port}/", ":9/") for part in health]
        assert arm_server.run(closed, timeout=120, check=False).returncode != 0
    text = log.read_text()
    assert "libmimalloc" in text, "doctor's report comes first"
    assert f"vllm-arm {vllm_arm.__version__} is active" in text
    assert GUEST_MODEL in text
    assert shlex.join(entry_point) == "vllm serve"
