# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with vllm-arm active, as an OpenAI client and the operating system see it."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

import vllm_arm
from demo.server import Server
from tests.integration.serving import EAGER, FORCED, READY_SECONDS, TRAINED_MODEL, library_names, minor_faults
from vllm_arm import envs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "server.log"
    with Server(TRAINED_MODEL, log, arguments=EAGER, environment=FORCED) as running:
        running.wait_until_ready(READY_SECONDS)
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as connected:
        yield connected


def complete(client: openai.OpenAI, prompt: str, tokens: int = 24) -> str:
    answer = client.completions.create(model=str(TRAINED_MODEL), prompt=prompt, max_tokens=tokens, temperature=0)
    return answer.choices[0].text


def test_the_plugin_is_active_and_its_variables_are_known(server: Server) -> None:
    log = server.log.read_text()
    assert f"vllm-arm {vllm_arm.__version__} is active" in log
    unknown = re.findall(r"Unknown vLLM environment variable detected: (\w+)", log)
    assert not set(unknown) & set(envs.VARIABLES)
    assert "rms_norm=['vllm_arm', 'native']" in log
    assert "libtcmalloc is not found" not in log
    assert re.search(r"attention runs on vllm-arm's \w+ kernel", log)


def test_a_chat_request_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=str(TRAINED_MODEL),
        messages=[{"role": "user", "content": "What does `os.path.join` do?"}],
        max_tokens=64,
        temperature=0,
    )
    content = answer.choices[0].message.content
    assert content
    assert re.search(r"[A-Za-z]{3}", content), "words, as the model was trained on"


def test_a_completion_continues_code(client: openai.OpenAI) -> None:
    text = complete(client, "class Stack:\n    def __init__(self):\n        self.")
    assert text.strip()
    assert complete(client, "class Stack:\n    def __init__(self):\n        self.") == text, "greedy is repeatable"


def test_an_answer_is_streamed(client: openai.OpenAI) -> None:
    prompt = "import os\nimport "
    events = list(
        client.completions.create(model=str(TRAINED_MODEL), prompt=prompt, max_tokens=24, temperature=0, stream=True)
    )
    assert len(events) > 1
    assert "".join(event.choices[0].text for event in events) == complete(client, prompt)


@pytest.mark.parametrize("name", ["EngineCore", "Worker"])
def test_mimalloc_and_one_openmp_runtime_are_mapped(server: Server, name: str) -> None:
    names = library_names(server.process_named(name))
    assert [library for library in names if library.startswith("libmimalloc")]
    assert not [library for library in names if "tcmalloc" in library]
    runtimes = [library for library in names if re.match(r"lib(gomp|omp|iomp)", library)]
    assert len(runtimes) == 1, runtimes


def test_the_worker_is_bound_to_its_cpus(server: Server) -> None:
    bound = re.search(r"local_rank=0, core ids=\[([\d, ]+)\]", server.log.read_text())
    assert bound
    cpus = {int(cpu) for cpu in bound[1].split(",")}
    assert set(server.process_named("Worker").cpu_affinity()) <= cpus


def test_the_other_processes_are_off_the_workers_cpus(server: Server) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU: every process is on it")
    worker = set(server.process_named("Worker").cpu_affinity())
    for process in (server.process_named("EngineCore"), psutil.Process(server.pid)):
        assert worker.isdisjoint(process.cpu_affinity())
    assert re.search(r"100\.0 % of its memory \(\d+ MiB\) is on NUMA node", server.log.read_text())


def test_a_warm_worker_hardly_faults(server: Server, client: openai.OpenAI) -> None:
    worker = server.process_named("Worker")
    prompt = "x = 1\n" * 200
    complete(client, prompt)
    before = minor_faults(worker)
    complete(client, prompt)
    assert minor_faults(worker) - before < 500


def test_a_compiled_model_runs_our_norm(client: openai.OpenAI, tmp_path: Path) -> None:
    """As on Arm, where the kernel beats generated code; here the portable one has to be asked for."""
    ours = ["vllm_arm", "native"]
    priority = json.dumps({"ir_op_priority": {"rms_norm": ours, "fused_add_rms_norm": ours}})
    arguments = ("--max-model-len", "1024", "--kernel-config", priority)
    with Server(TRAINED_MODEL, tmp_path / "server.log", arguments=arguments, environment=FORCED) as running:
        running.wait_until_ready(READY_SECONDS)
        log = running.log.read_text()
        assert "rms_norm=['vllm_arm', 'native']" in log
        assert "DYNAMO_TRACE_ONCE" in log
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as compiled:
            prompt = "import os\n\ndef main():\n    "
            assert complete(compiled, prompt, 8) == complete(client, prompt, 8)


def test_a_quantised_cache_is_served(client: openai.OpenAI, tmp_path: Path) -> None:
    arguments = (*EAGER, "--kv-cache-dtype", "int8_per_token_head")
    with Server(TRAINED_MODEL, tmp_path / "server.log", arguments=arguments, environment=FORCED) as running:
        running.wait_until_ready(READY_SECONDS)
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as quantised:
            prompt = "class Stack:\n"
            assert complete(quantised, prompt, 8) == complete(client, prompt, 8)


def test_kill_9_of_the_server_leaves_no_process_and_no_shared_memory(tmp_path: Path) -> None:
    with Server(TRAINED_MODEL, tmp_path / "server.log", arguments=EAGER, environment=FORCED) as running:
        running.wait_until_ready(READY_SECONDS)
        processes = running.processes()
        assert len(processes) >= 3
        shared_memory = running.shared_memory()
        assert shared_memory, "vLLM's processes talk through it"
        psutil.Process(running.pid).send_signal(signal.SIGKILL)
        started = time.monotonic()
        # By itself: before anybody cleans up after it.
        _, alive = psutil.wait_procs(processes, timeout=40)
        assert not alive, f"still alive after {time.monotonic() - started:.0f} s"
        assert "is gone: shutting down" in running.log.read_text()
        assert not [path for path in shared_memory if path.exists()]
