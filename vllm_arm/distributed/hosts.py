# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a group are on one host, that is, can share memory."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = ("net", "pid", "uts")


def host_identity() -> str:
    """What names this host: containers count as hosts of their own, for they share no memory by default."""
    parts = [socket.gethostname()]
    try:
        parts.append(_BOOT_ID.read_text().strip())
        parts += [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]
    except OSError:
        # Hardly a Linux without these; the host's name has to do.
        pass
    return " ".join(parts)


class HostLayout(NamedTuple):
    """The ranks of a group by host: ``hosts`` in the order of their first rank, each with its ranks ascending."""

    hosts: tuple[tuple[int, ...], ...]

    def host_of(self, rank: int) -> int:
        """The index of the host of ``rank``."""
        return next(index for index, ranks in enumerate(self.hosts) if rank in ranks)

    @property
    def is_even(self) -> bool:
        """Whether every host has the same number of ranks."""
        return len({len(ranks) for ranks in self.hosts}) == 1


def lay_out(identities: Sequence[str]) -> HostLayout:
    """Group ranks by the identity of their host; ``identities`` in rank order."""
    by_host: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        by_host.setdefault(identity, []).append(rank)
    return HostLayout(tuple(tuple(ranks) for ranks in by_host.values()))
