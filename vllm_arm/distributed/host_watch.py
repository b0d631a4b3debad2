# SPDX-License-Identifier: Apache-2.0
"""Ends this process where another host of its group goes: idle ranks would wait for it for ever.

One rank of each host holds a connection to the first host's; nothing is sent over it, it only breaks.
"""

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable

from vllm_arm.distributed.hosts import HostLayout
from vllm_arm.logs import get_logger

logger = get_logger(__name__)

_SECONDS_TO_CONNECT = 60
_SECONDS_TO_SHUT_DOWN = 20
# A host that loses its power sends nothing: ask after it every so often.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


def watch_hosts(
    exchange: Callable[[str], list[str]],
    layout: HostLayout,
    rank: int,
    name: str,
    address: str,
    end: Callable[[], None] | None = None,
) -> str:
    """Watch the other hosts of group ``name``; a collective call of its ranks, which exchange texts once.

    ``address`` is what other hosts reach this one by. ``end`` is called in a thread where a host has gone; by default
    it ends this process by SIGTERM. Returns why the hosts are not watched, empty where they are.
    """
    is_first = rank == 0
    listener = None
    place = ""
    if is_first:
        try:
            listener = socket.create_server((address, 0))
            place = f"{address} {listener.getsockname()[1]}"
        except OSError as error:
            logger.warning("hosts of group %s are not watched: %s: %s", name, address, error.strerror)
    place = exchange(place)[0]
    if not place:
        return "the first rank cannot listen"
    host, port = place.split()
    leaders = {index: ranks[0] for index, ranks in enumerate(layout.hosts) if 0 not in ranks}
    try:
        if listener is not None:
            with listener:
                listener.settimeout(_SECONDS_TO_CONNECT)
                links = [listener.accept()[0] for _ in leaders]
        elif rank in leaders.values():
            links = [socket.create_connection((host, int(port)), timeout=_SECONDS_TO_CONNECT)]
        else:
            return ""
    except OSError as error:
        return f"{host} port {port}: {error}"
    for link in links:
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            link.setsockopt(socket.IPPROTO_TCP, option, value)
    thread = threading.Thread(
        target=_watch, args=(links, name, end or _end_process), name=f"vllm-arm-host-watch-{name}", daemon=True
    )
    thread.start()
    return ""


def _watch(links: list[socket.socket], name: str, end: Callable[[], None]) -> None:
    peers = {link: link.getpeername()[0] for link in links}
    with selectors.DefaultSelector() as selector:
        for link in links:
            selector.register(link, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                broken = key.fileobj
                assert isinstance(broken, socket.socket)
                with contextlib.suppress(OSError):
                    if broken.recv(1):
                        continue
                logger.error("group %s: the host at %s is gone: shutting down", name, peers[broken])
                for other in links:
                    other.close()
                end()
                return


def _end_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SECONDS_TO_SHUT_DOWN)
    os.kill(os.getpid(), signal.SIGKILL)
