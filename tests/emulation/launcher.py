# SPDX-License-Identifier: Apache-2.0
"""Run one command in an Arm root, in namespaces of its own, so that nothing of it can be left.

A script, not an import: `python launcher.py SPEC_FD LIFELINE_FD`. SPEC_FD holds the JSON described
by `LaunchSpec`. The processes are

    launcher (host)  ->  init (PID 1 of a new PID namespace)  ->  the command, chrooted

The mount namespace goes with its last process, and the kernel kills every process of the PID
namespace when init ends. Init is killed when the launcher dies, and the launcher exits when the
writing end of LIFELINE_FD is closed, by its holder or by the holder's death. LIFELINE_FD may be -1.

The exit status is the command's, or 128 + N where signal N ended it, or 125 with one line on
stderr where the command could not be started.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import stat
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypedDict

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_PDEATHSIG = 1
CANNOT_START = 125
FORWARDED_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_LINKS = {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
BINFMT_DIRECTORY = "/proc/sys/fs/binfmt_misc"
WHOLE_ID_RANGE = "0 0 4294967295\n"
TEMPORARY_DIRECTORIES = ("tmp", "run", "var/tmp")
# A place in the root where nothing lives, to assemble the guest's file tree on.
WORKSPACE = "run"

libc = ctypes.CDLL(None, use_errno=True)


class Bind(TypedDict):
    """A host file or directory shown in the guest."""

    host: str
    guest: str
    read_only: bool


class LaunchSpec(TypedDict):
    """What to run and how the guest looks.

    `handler` is the binfmt_misc line to register privately, or None where the host has one.
    `files` (text by path) and `links` (target by path) are laid out; `cpuinfo` is /proc/cpuinfo;
    `shm_size` is the size of /dev/shm as tmpfs takes it ("64m", "50%").
    """

    root: str
    handler: str | None
    argv: list[str]
    env: dict[str, str]
    cwd: str
    binds: list[Bind]
    files: dict[str, str]
    links: dict[str, str]
    cpuinfo: str
    shm_size: str


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    result = libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(result, f"mount {kind or source} on {target}")


def _bind(source: str, target: str, read_only: bool = False) -> None:
    if stat.S_ISDIR(os.stat(source).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    _mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        # The kernel refuses to drop the flags that the source was mounted with.
        kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
        _mount("", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY | kept)


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


def enter_namespaces(private_handler: bool) -> None:
    """Move to new mount and PID namespaces, and to a new user namespace for a private handler.

    A user namespace has its own binfmt_misc. All IDs are mapped to themselves, which only a
    process outside may do: a helper child stays behind for that.
    """
    if not private_handler:
        _check(libc.unshare(CLONE_NEWNS | CLONE_NEWPID), "unshare")
        return
    launcher = os.getpid()
    ready_reader, ready_writer = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(ready_writer)
        if os.read(ready_reader, 1) == b"1":
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{launcher}/{name}").write_text(WHOLE_ID_RANGE)
        os._exit(0)
    os.close(ready_reader)
    try:
        _check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID), "unshare")
        os.write(ready_writer, b"1")
    finally:
        os.close(ready_writer)
        os.waitpid(helper, 0)
    if not Path("/proc/self/uid_map").read_text().strip():
        raise OSError("the user namespace's IDs could not be mapped")


def register_handler(line: str) -> None:
    """Make this user namespace run Arm programs by QEMU; the host's settings stay as they are."""
    _mount("binfmt_misc", BINFMT_DIRECTORY, "binfmt_misc")
    with open(f"{BINFMT_DIRECTORY}/register", "w") as register:
        register.write(line)


def assemble_guest(spec: LaunchSpec) -> str:
    """Lay the guest's file tree over the pristine root; returns the directory to chroot to.

    What the guest writes goes to memory and is gone with it, except through binds.
    """
    _mount("none", "/", flags=MS_REC | MS_PRIVATE)
    workspace = f"{spec['root']}/{WORKSPACE}"
    _mount("tmpfs", workspace, "tmpfs")
    upper, work, guest = (f"{workspace}/{name}" for name in ("upper", "work", "guest"))
    for directory in (upper, work, guest):
        os.mkdir(directory)
    options = f"lowerdir={spec['root']},upperdir={upper},workdir={work}"
    _mount("overlay", guest, "overlay", options=options)
    for name in TEMPORARY_DIRECTORIES:
        os.makedirs(f"{guest}/{name}", exist_ok=True)
        _mount("tmpfs", f"{guest}/{name}", "tmpfs", options="mode=1777")
    _mount("tmpfs", f"{guest}/dev", "tmpfs", options="mode=755")
    for name in DEVICES:
        _bind(f"/dev/{name}", f"{guest}/dev/{name}")
    for name, target in DEVICE_LINKS.items():
        os.symlink(f"/proc/self/{target}", f"{guest}/dev/{name}")
    os.mkdir(f"{guest}/dev/shm")
    shm_options = f"mode=1777,size={spec['shm_size']}"
    _mount("tmpfs", f"{guest}/dev/shm", "tmpfs", options=shm_options)
    _mount("tmpfs", f"{guest}/sys", "tmpfs", options="mode=755")
    for path, text in spec["files"].items():
        _write(guest + path, text + "\n")
    for path, target in spec["links"].items():
        os.makedirs(os.path.dirname(guest + path), exist_ok=True)
        os.symlink(target, guest + path)
    _mount("proc", f"{guest}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _write(f"{workspace}/cpuinfo", spec["cpuinfo"])
    _bind(f"{workspace}/cpuinfo", f"{guest}/proc/cpuinfo", read_only=True)
    for bind in spec["binds"]:
        _bind(bind["host"], guest + bind["guest"], bind["read_only"])
    return guest


def exec_command(spec: LaunchSpec, guest: str) -> NoReturn:
    """Become the command, inside the guest."""
    try:
        # A session of its own: a terminal's Ctrl-C reaches it once, forwarded, and not twice.
        os.setsid()
        os.chroot(guest)
        os.chdir(spec["cwd"])
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in FORWARDED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    except OSError as error:
        print(f"arm guest: {spec['argv'][0]}: {error.strerror}", file=sys.stderr)
    os._exit(CANNOT_START)


def forward_signals(target: int) -> None:
    """From now on pass signals on to process `target`."""

    def forward(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, number)

    for number in FORWARDED_SIGNALS:
        signal.signal(number, forward)


def exit_code(status: int) -> int:
    """A wait status in the shell's convention."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def run_init(spec: LaunchSpec) -> NoReturn:
    """PID 1: prepare the guest, start the command, adopt and reap orphans, end with the command."""
    _check(libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)), "prctl")
    code = CANNOT_START
    try:
        if spec["handler"]:
            register_handler(spec["handler"])
        guest = assemble_guest(spec)
        command = os.fork()
        if command == 0:
            exec_command(spec, guest)
        forward_signals(command)
        while True:
            child, status = os.wait()
            if child == command:
                code = exit_code(status)
                break
    except OSError as error:
        print(f"arm guest: {error.strerror or error}", file=sys.stderr)
    os._exit(code)


def wait_for(init: int, lifeline: int) -> int:
    """Wait for init's end and return its exit code; kill it when `lifeline` is closed."""
    # No thread: after unshare(CLONE_NEWPID) the kernel refuses to start any.
    ended = os.pidfd_open(init)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    if lifeline >= 0:
        poll.register(lifeline, select.POLLIN)
    if ended not in dict(poll.poll()):
        os.kill(init, signal.SIGKILL)
    return exit_code(os.waitpid(init, 0)[1])


def main() -> int:
    """Read the specification and run it."""
    spec_fd, lifeline = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(spec_fd) as file:
        spec: LaunchSpec = json.load(file)
    # Held by every process of the guest: whoever clears old roots away passes over this one.
    in_use = os.open(spec["root"], os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(in_use, fcntl.LOCK_SH)
    try:
        enter_namespaces(private_handler=spec["handler"] is not None)
    except OSError as error:
        print(f"arm guest: {error.strerror or error}", file=sys.stderr)
        return CANNOT_START
    init = os.fork()
    if init == 0:
        if lifeline >= 0:
            os.close(lifeline)
        run_init(spec)
    forward_signals(init)
    return wait_for(init, lifeline)


if __name__ == "__main__":
    sys.exit(main())
