# SPDX-License-Identifier: Apache-2.0
"""Ranks by host, and the end of ranks whose host's partner has gone."""

import socket
import threading

import pytest

from vllm_arm.distributed import host_watch
from vllm_arm.distributed.host_watch import watch_hosts
from vllm_arm.distributed.hosts import host_identity, lay_out


def test_ranks_are_grouped_by_host_in_the_order_of_their_first() -> None:
    layout = lay_out(["b", "a", "b", "a"])
    assert layout.hosts == ((0, 2), (1, 3))
    assert [layout.host_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert layout.is_even
    assert not lay_out(["a", "a", "b"]).is_even


def test_a_host_is_more_than_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = host_identity()
    assert identity == host_identity()
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    assert host_identity() != identity


class Ranks:
    """Ranks as threads, which exchange texts and note that they were ended."""

    def __init__(self, hosts: list[str]) -> None:
        self.layout = lay_out(hosts)
        self._texts = [""] * len(hosts)
        self._barrier = threading.Barrier(len(hosts), timeout=20)
        self.ended = [threading.Event() for _ in hosts]
        self.problems = [""] * len(hosts)
        self._threads = [threading.Thread(target=self._run, args=(rank,)) for rank in range(len(hosts))]

    def _exchange(self, rank: int, text: str) -> list[str]:
        self._texts[rank] = text
        self._barrier.wait()
        return list(self._texts)

    def _run(self, rank: int) -> None:
        self.problems[rank] = watch_hosts(
            lambda text: self._exchange(rank, text), self.layout, rank, "tp:0", "127.0.0.1", self.ended[rank].set
        )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


def test_when_a_host_goes_the_first_and_then_all_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    connect = socket.create_connection

    def note(address: tuple[str, int], timeout: float) -> socket.socket:
        made.append(connect(address, timeout=timeout))
        return made[-1]

    monkeypatch.setattr(socket, "create_connection", note)
    ranks = Ranks(["a", "a", "b", "b", "c"])
    ranks.start()
    assert ranks.problems == [""] * 5
    assert len(made) == 2, "one rank of each further host"
    assert not any(event.wait(0.1) for event in ranks.ended)
    made[0].shutdown(socket.SHUT_RDWR)
    for rank in (0, 2, 4):
        assert ranks.ended[rank].wait(10), f"rank {rank} goes on"
    assert not ranks.ended[1].is_set(), "not linked: its host's process tree ends it"


def test_hosts_that_cannot_connect_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> socket.socket:
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(host_watch, "_SECONDS_TO_CONNECT", 0.2)
    monkeypatch.setattr(socket, "create_connection", refuse)
    ranks = Ranks(["a", "b"])
    ranks.start()
    assert "timed out" in ranks.problems[0]
    assert "refused" in ranks.problems[1]
