# SPDX-License-Identifier: Apache-2.0
"""Runs ``vllm serve`` as a child: starts it, waits until it answers, and leaves nothing of it behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil

_POLL_SECONDS = 0.25
_STOP_SECONDS = 30
_SHARED_MEMORY = Path("/dev/shm")


class ServerError(Exception):
    """The server cannot be started, or has ended; the message is one line for a user."""


def free_port() -> int:
    """A TCP port on the loopback that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def check_port(port: int) -> None:
    """Raise ``ServerError`` where ``port`` is taken."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServerError(f"port {port} cannot be used: {error.strerror}; choose another") from None


def check_model(model: Path) -> None:
    """Raise ``ServerError`` where ``model`` is no folder of a Hugging Face model."""
    if not (model / "config.json").is_file():
        raise ServerError(f"no model at {model}: expected a folder with config.json")


def session_processes(leader: int) -> list[psutil.Process]:
    """Every living process of the session that process ``leader`` started, wherever their parents are."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return found


class Server:
    """``vllm serve MODEL`` on the loopback, in a process group of its own.

    Use it as a context manager; on leaving, the server and all its processes are gone and so are their files in
    /dev/shm, even if the server was killed. ``log`` takes what the server prints.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        port: int | None = None,
        arguments: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        check_model(model)
        if port is not None:
            check_port(port)
        self.model = model
        self.log = log
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = arguments
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [
            *(str(Path(sys.executable).with_name("vllm")), "serve", str(self.model)),
            *("--host", "127.0.0.1", "--port", str(self.port), *self._arguments),
        ]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id of the API server."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def is_running(self) -> bool:
        """Whether the API server's process lives."""
        return self._process is not None and self._process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Every living process of the server: those of its session, wherever their parents are."""
        return session_processes(self.pid)

    def process_named(self, name: str) -> psutil.Process:
        """The one process whose title holds ``name``: ``EngineCore`` or ``Worker``."""
        found = [process for process in self.processes() if name in " ".join(process.cmdline())]
        if len(found) != 1:
            raise ServerError(f"expected one process named {name}, found {len(found)}")
        return found[0]

    def wait_until_ready(self, timeout: float, progress: Callable[[str], None] = lambda line: None) -> None:
        """Wait until the server answers, telling ``progress`` its last log line.

        Raises ``ServerError`` where it ends first or takes longer than ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not self.is_running():
                raise ServerError(f"the server ended while starting: {self._last_error()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            progress(self._last_line())
            time.sleep(_POLL_SECONDS)
        raise ServerError(f"the server did not answer within {timeout:.0f} s; see {self.log}")

    def stop(self) -> None:
        """End the server: by SIGTERM, then by SIGKILL, and remove what it left in /dev/shm."""
        if self._process is None:
            return
        shared_memory = self.shared_memory()
        if self.is_running():
            self._process.terminate()
        _, alive = psutil.wait_procs(self.processes(), timeout=_STOP_SECONDS)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=_STOP_SECONDS)
        self._process.wait()
        for path in shared_memory:
            path.unlink(missing_ok=True)

    def shared_memory(self) -> set[Path]:
        """The files in /dev/shm that the server's processes map."""
        found: set[Path] = set()
        for process in self.processes():
            try:
                paths = {Path(mapped.path) for mapped in process.memory_maps(grouped=True)}
            except psutil.Error:
                continue
            found |= {path for path in paths if path.parent == _SHARED_MEMORY and path.exists()}
        return found

    def _lines(self) -> list[str]:
        try:
            return [line for line in self.log.read_text(errors="replace").splitlines() if line]
        except OSError:
            return []

    def _last_line(self) -> str:
        lines = self._lines()
        return lines[-1] if lines else "starting"

    def _last_error(self) -> str:
        errors = [line for line in self._lines() if "Error" in line]
        return f"{errors[-1] if errors else self._last_line()} (see {self.log})"


def end_on_signals() -> None:
    """Turn SIGTERM and SIGHUP into ``SystemExit``, so that context managers clean up."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
