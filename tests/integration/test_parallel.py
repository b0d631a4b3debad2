# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` over two ranks: the answers of one rank, and an orderly end whatever happens to a rank."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from demo.server import Server, free_port, session_processes
from tests.integration.second_host import second_host, why_not
from tests.integration.serving import EAGER, FORCED, READY_SECONDS, TRAINED_MODEL, library_names
from tests.integration.several_ranks import EXACT, PROMPTS, Answer, ask, assert_same, complete, serve
from tests.models.quantised import make_mixtral
from tests.models.random_mixtral import make_random_mixtral

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two CPUs"),
]

END_SECONDS = 60


def worker(server: Server, name: str) -> psutil.Process:
    (found,) = [process for process in server.processes() if f"Worker_{name}" in " ".join(process.cmdline())]
    return found


def assert_gone(processes: list[psutil.Process], shared_memory: set[Path]) -> None:
    """By themselves: before anybody cleans up after them."""
    started = time.monotonic()
    _, alive = psutil.wait_procs(processes, timeout=END_SECONDS)
    assert not alive, f"still alive after {time.monotonic() - started:.0f} s: {alive}"
    assert not [path for path in shared_memory if path.exists()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    with serve(tmp_path_factory.mktemp("one"), *EAGER, *EXACT) as server:
        server.wait_until_ready(READY_SECONDS)
        return ask(server)


def test_two_tensor_parallel_ranks(expected: list[Answer], tmp_path: Path) -> None:
    """Compiled, as users run it; ended by SIGTERM."""
    with serve(tmp_path, *EXACT, "--max-model-len", "1024", "--tensor-parallel-size", "2") as server:
        server.wait_until_ready(READY_SECONDS)
        log = server.log.read_text()
        assert "collectives of group tp:0, 2 ranks: shared memory" in log
        affinities = [worker(server, name).cpu_affinity() for name in ("TP0", "TP1")]
        assert set(affinities[0]).isdisjoint(affinities[1])
        assert_same(ask(server), expected)

        processes, shared_memory = server.processes(), server.shared_memory()
        psutil.Process(server.pid).terminate()
        assert_gone(processes, shared_memory)
        log = server.log.read_text()
        assert "[shutdown] API server: shutdown triggered" in log
        assert "has died" not in log


def test_two_pipeline_stages(expected: list[Answer], tmp_path: Path) -> None:
    """Eager, which vLLM's later stages do not survive by themselves; ended by the death of a stage."""
    with serve(tmp_path, *EAGER, *EXACT, "--pipeline-parallel-size", "2") as server:
        server.wait_until_ready(READY_SECONDS)
        assert "collectives of group pp:0, 2 ranks: shared memory" in server.log.read_text()
        assert_same(ask(server), expected)

        processes, shared_memory = server.processes(), server.shared_memory()
        victim = worker(server, "PP0")
        with ThreadPoolExecutor() as pool:
            long_request = pool.submit(complete, server, PROMPTS[0], 900)
            time.sleep(1)
            victim.send_signal(signal.SIGKILL)
            assert_gone(processes, shared_memory)
            assert long_request.exception() is not None, "answered in spite of its death"
        # By the other stage, or by vLLM where it is faster and ends the other stage.
        log = server.log.read_text()
        assert f"rank 0 (process {victim.pid}) has died" in log or "Worker proc VllmWorker-0 died unexpectedly" in log


def test_two_hosts(expected: list[Answer], tmp_path: Path) -> None:
    """A rank on each; ended by SIGTERM to the first host's server, upon which the second host ends by itself."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with second_host() as host:
        master = ("--nnodes", "2", "--master-addr", host.our_address, "--master-port", str(free_port()))
        arguments = (*EAGER, *EXACT, "--tensor-parallel-size", "2", *master)
        variables = {"GLOO_SOCKET_IFNAME": host.interface}
        vllm = str(Path(sys.executable).with_name("vllm"))
        command = (vllm, "serve", str(TRAINED_MODEL), *arguments, "--headless", "--node-rank", "1")
        log = tmp_path / "second.log"
        with log.open("wb") as output:
            second = subprocess.Popen(
                host.command(*command),
                env={**os.environ, **FORCED, **variables, "VLLM_HOST_IP": host.address},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            variables["VLLM_HOST_IP"] = host.our_address
            with serve(tmp_path, *arguments, "--node-rank", "0", **variables) as server:
                server.wait_until_ready(READY_SECONDS)
                assert_same(ask(server), expected)
                there = session_processes(second.pid)
                assert [process for process in there if "Worker_TP1" in " ".join(process.cmdline())]
                assert any("libmimalloc" in name for process in there for name in library_names(process))
                processes, shared_memory = server.processes(), server.shared_memory()
                psutil.Process(server.pid).terminate()
                assert_gone(processes, shared_memory)
            second.wait(END_SECONDS)
            assert_gone(there, set())
            assert f"the host at {host.our_address} is gone: shutting down" in log.read_text()
        finally:
            for process in session_processes(second.pid):
                process.kill()
            second.wait()


def test_two_data_parallel_ranks_share_experts(tmp_path: Path) -> None:
    """Each rank has half of the experts, and its own requests: tokens travel to the experts and back."""
    model = make_random_mixtral(tmp_path / "mixtral")
    with serve(tmp_path, *EAGER, model=model) as server:
        server.wait_until_ready(READY_SECONDS)
        alone = ask(server)
    parallel = ("--data-parallel-size", "2", "--enable-expert-parallel", "--api-server-count", "1")
    with serve(tmp_path, *EAGER, *parallel, model=model) as server:
        server.wait_until_ready(READY_SECONDS)
        log = server.log.read_text()
        for group in ("dp:0", "ep:0"):
            assert f"collectives of group {group}, 2 ranks: shared memory" in log
        affinities = [worker(server, name).cpu_affinity() for name in ("DP0_EP0", "DP1_EP1")]
        assert set(affinities[0]).isdisjoint(affinities[1])
        assert_same(ask(server), alone)


def test_two_ranks_share_quantised_experts(tmp_path: Path) -> None:
    """Compiled; each rank reads a checkpoint of all experts, and quantises its half of them."""
    model = make_mixtral(tmp_path / "mixtral")
    quantised = ("--quantization", "arm_int8")
    with serve(tmp_path, *EAGER, *quantised, model=model) as server:
        server.wait_until_ready(READY_SECONDS)
        alone = ask(server)
    parallel = ("--tensor-parallel-size", "2", "--enable-expert-parallel", "--max-model-len", "1024")
    with serve(tmp_path, *quantised, *parallel, model=model) as server:
        server.wait_until_ready(READY_SECONDS)
        assert_same(ask(server), alone)
