# SPDX-License-Identifier: Apache-2.0
"""``vllm serve --distributed-executor-backend ray``, over one machine and over two."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from demo.server import free_port
from tests.integration.second_host import second_host, why_not
from tests.integration.serving import EAGER, FORCED, READY_SECONDS, library_names
from tests.integration.several_ranks import EXACT, Answer, ask, assert_same, serve
from vllm_arm.runtime.process import RAY_WORKER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install -r requirements/ray.txt"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two CPUs"),
]

OVER_RAY = ("--distributed-executor-backend", "ray", "--tensor-parallel-size", "2")
# Every process that Ray starts inherits it: they are in sessions of their own.
MARK = "RAY_OF_THIS_TEST"
END_SECONDS = 60


def marked(mark: str) -> list[psutil.Process]:
    """The living processes that were started with the variable ``MARK`` of this value."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def find_workers(mark: str) -> list[psutil.Process]:
    """Ray holds further processes ready, in the same environment."""
    return [process for process in marked(mark) if "ArmRayWorker" in " ".join(process.cmdline())]


@pytest.fixture
def mark() -> Iterator[str]:
    """A value of ``MARK``; nothing that was started with it is left."""
    value = secrets.token_hex(8)
    yield value
    left = marked(value)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=END_SECONDS)


def ray_variables(mark: str) -> dict[str, str]:
    """``MARK``, and a token that only this cluster has."""
    return {MARK: mark, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def wait_until(condition: Callable[[], bool], what: str, seconds: float = END_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    with serve(tmp_path_factory.mktemp("one"), *EAGER, *EXACT) as server:
        server.wait_until_ready(READY_SECONDS)
        return ask(server)


def check_workers(workers: Sequence[psutil.Process]) -> None:
    """Ray's workers have the allocator, and those of one machine have CPUs of their own."""
    assert len(workers) == 2
    for worker in workers:
        assert any("libmimalloc" in name for name in library_names(worker))


def test_one_machine(expected: list[Answer], mark: str, tmp_path: Path) -> None:
    """Ray is started by vLLM; the server is ended by the death of a worker."""
    with serve(tmp_path, *EAGER, *EXACT, *OVER_RAY, **ray_variables(mark)) as server:
        server.wait_until_ready(READY_SECONDS)
        log = server.log.read_text()
        assert "collectives of group tp:0, 2 ranks: shared memory" in log
        workers = find_workers(mark)
        check_workers(workers)
        affinities = [set(worker.cpu_affinity()) for worker in workers]
        assert affinities[0].isdisjoint(affinities[1])
        assert_same(ask(server), expected)

        workers[0].send_signal(signal.SIGKILL)
        wait_until(lambda: not server.is_running(), "the server goes on without a worker")
        assert "died unexpectedly" in server.log.read_text()
    wait_until(lambda: not marked(mark), "Ray goes on without its server")


@contextmanager
def ray_node(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> Iterator[None]:
    """A node of a Ray cluster that takes one worker."""
    arguments = ("--block", "--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *arguments], stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **variables}
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(END_SECONDS)


def test_two_machines(expected: list[Answer], mark: str, tmp_path: Path) -> None:
    """A node of a cluster on each, a worker on each node; the server is ended by SIGTERM."""
    if reason := why_not():
        pytest.skip(reason)
    ray = str(Path(sys.executable).with_name("ray"))
    with second_host() as host:
        variables = {**FORCED, **ray_variables(mark), "GLOO_SOCKET_IFNAME": host.interface}
        address = f"{host.our_address}:{free_port()}"
        first = (ray, "start", "--head", "--node-ip-address", host.our_address, "--port", address.split(":")[1])
        second = host.command(ray, "start", "--address", address, "--node-ip-address", host.address)
        with (
            # A short path, for there are sockets in it.
            tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
            ray_node((*first, "--temp-dir", folder), tmp_path / "first.log", variables),
            ray_node(second, tmp_path / "second.log", variables),
        ):
            variables |= {"RAY_ADDRESS": address, "VLLM_HOST_IP": host.our_address}
            with serve(tmp_path, *EAGER, *EXACT, *OVER_RAY, **variables) as server:
                server.wait_until_ready(READY_SECONDS)
                log = server.log.read_text()
                assert "collectives of group tp:0, 2 ranks: torch.distributed" in log
                workers = find_workers(mark)
                check_workers(workers)
                networks = {os.readlink(f"/proc/{worker.pid}/ns/net") for worker in workers}
                assert len(networks) == 2, "one worker on each machine"
                assert_same(ask(server), expected)
                psutil.Process(server.pid).terminate()
                wait_until(lambda: not find_workers(mark), "the workers go on without a server")


def test_ray_workers_get_what_a_process_needs_at_its_start() -> None:
    from vllm_arm.distributed.ray_executor import variables_at_start

    given = {
        "LD_PRELOAD": "a.so",
        "VLLM_ARM_NORM": "0",
        "MIMALLOC_ALLOW_THP": "1",
        "VLLM_HOST_IP": "10.0.0.1",
        "A": "b",
    }
    assert variables_at_start(given) == {
        "LD_PRELOAD": "a.so",
        "VLLM_ARM_NORM": "0",
        "MIMALLOC_ALLOW_THP": "1",
        RAY_WORKER: "1",
    }
