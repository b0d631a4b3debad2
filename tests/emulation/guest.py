# SPDX-License-Identifier: Apache-2.0
"""Run commands in an emulated Arm root."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from .cpu_models import cpu_model
from .fake_system import fake_cpuinfo, fake_sysfs, host_cpus, host_memory
from .launcher import Bind, LaunchSpec
from .qemu import handler_line

LAUNCHER = Path(__file__).with_name("launcher.py")
DEFAULT_CPU = "v2"
BASE_ENVIRONMENT = {
    "HOME": "/root",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # vLLM gives its engine ten minutes to start; emulated and beside other work it may need more.
    "VLLM_ENGINE_READY_TIMEOUT_S": "3000",
}


def parse_bind(text: str) -> Bind:
    """`HOST:GUEST` or `HOST:GUEST:ro`; ValueError says what is wrong with it."""
    host, _, rest = text.partition(":")
    guest, _, mode = rest.partition(":")
    if not guest.startswith("/") or ".." in PurePosixPath(guest).parts or mode not in ("", "ro"):
        raise ValueError(f"--bind: expected HOST:/GUEST or HOST:/GUEST:ro, found {text!r}")
    if not Path(host).exists():
        raise ValueError(f"--bind: {host} does not exist")
    return Bind(host=str(Path(host).resolve()), guest=guest, read_only=mode == "ro")


def parse_env(items: Iterable[str], host: Mapping[str, str] | None = None) -> dict[str, str]:
    """`K=V` sets a variable; `K` takes the host's value, where it has one."""
    host = os.environ if host is None else host
    result = {}
    for item in items:
        name, separator, value = item.partition("=")
        if not name:
            raise ValueError(f"--env: expected NAME=VALUE or NAME, found {item!r}")
        if separator:
            result[name] = value
        elif name in host:
            result[name] = host[name]
    return result


class GuestProcess(subprocess.Popen[str]):
    """A running guest. `terminate` asks the command to end; `kill` ends every guest process.

    So does the end of the process that holds this object, however it ends.
    """

    lifeline: int = -1

    def __del__(self) -> None:
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1
        super().__del__()


@dataclass
class ArmRoot:
    """An emulated Arm server.

    `path` is a root built by `make-root`. `usr_local` is a host directory that becomes the guest's
    /usr/local (see `install`); `binds` are shown in every guest. Each run starts from the pristine
    root: what it writes outside binds is dropped when it ends. The network is the host's.
    """

    path: Path
    usr_local: Path | None = None
    binds: list[Bind] = field(default_factory=list)

    def launch_spec(
        self,
        args: Sequence[str | Path],
        *,
        cpu: str = DEFAULT_CPU,
        env: Mapping[str, str] | None = None,
        binds: Sequence[Bind] = (),
        cwd: str = "/",
        nodes: int = 1,
        midr: int | None = None,
        shm_size: str = "50%",
    ) -> LaunchSpec:
        """The launcher's orders for one command; see `run` for the arguments."""
        model = cpu_model(cpu)
        if midr is not None:
            model = model.with_midr(midr)
        tree = fake_sysfs(model, host_cpus(), nodes, host_memory())
        hosts = f"127.0.0.1 localhost {socket.gethostname()}"
        every_bind = [*self.binds, *binds]
        if self.usr_local:
            self.usr_local.mkdir(parents=True, exist_ok=True)
            host = str(self.usr_local.resolve())
            every_bind.insert(0, Bind(host=host, guest="/usr/local", read_only=False))
        return {
            "root": str(self.path.resolve()),
            "handler": handler_line(),
            "argv": [str(arg) for arg in args],
            "env": {**BASE_ENVIRONMENT, "QEMU_CPU": model.qemu_cpu, **(env or {})},
            "cwd": cwd,
            "binds": every_bind,
            "files": {**tree.files, "/etc/hosts": hosts},
            "links": tree.links,
            "cpuinfo": fake_cpuinfo(model, host_cpus()),
            "shm_size": shm_size,
        }

    def popen(
        self,
        args: Sequence[str | Path],
        *,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
        **options: Any,
    ) -> GuestProcess:
        """Start a command and return at once; `options` are those of `launch_spec`."""
        spec_fd = write_spec(self.launch_spec(args, **options))
        reader, writer = os.pipe()
        try:
            process = GuestProcess(
                launcher_command(spec_fd, reader),
                pass_fds=(spec_fd, reader),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                text=True,
            )
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(spec_fd)
            os.close(reader)
        process.lifeline = writer
        return process

    def run(
        self,
        args: Sequence[str | Path],
        *,
        cpu: str = DEFAULT_CPU,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        check: bool = True,
        capture: bool = True,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, as `subprocess.run` does.

        `cpu` names one of CPU_MODELS; `env` is added to BASE_ENVIRONMENT, nothing else of the
        caller's environment is passed; `binds`, `cwd`, `nodes` (NUMA nodes to show), `midr`
        (another MIDR_EL1 for /sys) and `shm_size` are as in `launch_spec`. The return code is
        128 + N where signal N ended the command. Raises CalledProcessError (with the output in
        its notes) if `check`, and TimeoutExpired after `timeout` seconds, with the guest killed.
        """
        pipe = subprocess.PIPE if capture else None
        process = self.popen(args, cpu=cpu, env=env, stdout=pipe, stderr=pipe, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        done = subprocess.CompletedProcess([str(a) for a in args], process.returncode, out, err)
        if check and done.returncode:
            error = subprocess.CalledProcessError(done.returncode, done.args, out, err)
            error.add_note(f"stdout:\n{out}\nstderr:\n{err}")
            raise error
        return done

    def exec(self, args: Sequence[str | Path], **options: Any) -> None:
        """Replace this process by the command, with the terminal and the signals."""
        spec_fd = write_spec(self.launch_spec(args, **options))
        os.set_inheritable(spec_fd, True)
        command = launcher_command(spec_fd, -1)
        os.execv(command[0], command)


def write_spec(spec: LaunchSpec) -> int:
    """Put the launcher's orders into an anonymous file; returns its descriptor, at the start."""
    descriptor = os.memfd_create("arm-guest")
    with open(descriptor, "w", closefd=False) as file:
        json.dump(spec, file)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def launcher_command(spec_fd: int, lifeline: int) -> list[str]:
    """The launcher's command line; isolated from the caller's Python settings."""
    return [sys.executable, "-I", "-S", str(LAUNCHER), str(spec_fd), str(lifeline)]
