# SPDX-License-Identifier: Apache-2.0
"""A network namespace that stands for a second host, joined to this one by a virtual cable. Needs root and iproute2."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple


class SecondHost(NamedTuple):
    """The name of the namespace, both ends' addresses, and the interface that has the same name at both."""

    name: str
    address: str
    our_address: str
    interface: str

    def command(self, *arguments: str) -> list[str]:
        """The command that runs ``arguments`` there, with a /dev/shm of its own."""
        # The command's mounts are its own already.
        shell = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self.name, "sh", "-c", shell, "sh", *arguments]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


def why_not() -> str:
    """Why there can be no second host here; empty where there can."""
    if shutil.which("ip") is None:
        return "ip is missing: install iproute2"
    try:
        with second_host():
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made: {error.stderr.strip()}"


@contextmanager
def second_host() -> Iterator[SecondHost]:
    """Make the namespace and the cable, and take both away again."""
    number = os.getpid() % 60000
    name, interface, there = f"vllm-arm-{number}", f"va{number}", f"vb{number}"
    prefix = f"10.213.{number // 256}"
    host = SecondHost(name, f"{prefix}.{number % 128 * 2 + 1}", f"{prefix}.{number % 128 * 2}", interface)
    with ExitStack() as stack:
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "delete", name)
        _ip("link", "add", interface, "type", "veth", "peer", "name", there)
        # At once: with its namespace it would go some time later.
        stack.callback(_ip, "link", "delete", interface)
        _ip("link", "set", there, "netns", name)
        _ip("-n", name, "link", "set", there, "name", interface)
        for arguments, address in (((), host.our_address), (("-n", name), host.address)):
            _ip(*arguments, "address", "add", f"{address}/31", "dev", interface)
            _ip(*arguments, "link", "set", interface, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield host
