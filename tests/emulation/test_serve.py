# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` on the emulated Arm server, with the same greedy tokens as on this machine."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from transformers import AutoTokenizer

import vllm_arm
from demo.server import Server, free_port
from tests.emulation.conftest import GUEST_TESTS
from tests.emulation.guest import ArmRoot
from tests.integration.greedy import Answer, compare
from tests.integration.serving import EAGER, FORCED, READY_SECONDS, TRAINED_MODEL
from tests.models.perplexity import held_out_token_windows

# Many short answers: after a different token, what follows cannot be compared.
PROMPTS, PROMPT_TOKENS, TOKENS = 40, 16, 24
PROMPTS_OF_TWO_RANKS = 12
EMULATED_READY_SECONDS = 900
GUEST_MODEL = f"{GUEST_TESTS}/models/tiny-llama"


def greedy_answers(url: str, model: str, timeout: float, prompts: int = PROMPTS) -> list[Answer]:
    """The completions of the first held-out prompts, asked for in one request so that they run as one batch."""
    tokenizer = AutoTokenizer.from_pretrained(TRAINED_MODEL)
    response = httpx.post(
        f"{url}/v1/completions",
        json={
            "model": model,
            "prompt": held_out_token_windows(tokenizer, prompts, PROMPT_TOKENS),
            "max_tokens": TOKENS,
            "temperature": 0,
            "logprobs": 2,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
        },
        timeout=timeout,
    )
    response.raise_for_status()
    answers = []
    for choice in response.json()["choices"]:
        best_two = [sorted(top.values(), reverse=True)[:2] for top in choice["logprobs"]["top_logprobs"]]
        answers.append(Answer(choice["logprobs"]["tokens"], [best - second for best, second in best_two]))
    return answers


def wait_until_ready(url: str, is_running: Callable[[], bool], log: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        assert is_running(), log.read_text()[-4000:]
        try:
            if httpx.get(f"{url}/health", timeout=10).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            time.sleep(1)
    pytest.fail(f"not ready after {timeout} s: {log.read_text()[-4000:]}")


@contextmanager
def emulated_server(
    arm_server: ArmRoot, log: Path, cpu: str, command: Sequence[str] = ("vllm", "serve"), options: Sequence[str] = ()
) -> Iterator[str]:
    """``vllm serve`` in the guest; gives its address, which is on the host's loopback."""
    port = free_port()
    arguments = ("--host", "127.0.0.1", "--port", str(port), *EAGER, "--max-num-batched-tokens", "1024", *options)
    with log.open("w") as output:
        process = arm_server.popen(
            [*command, GUEST_MODEL, *arguments],
            cpu=cpu,
            # Log probabilities go through torch.compile even in eager mode, and the guest has no compiler.
            env={"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"},
            stdout=output,
            stderr=output,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, lambda: process.poll() is None, log, EMULATED_READY_SECONDS)
        yield url
    finally:
        process.kill()
        process.wait()


def mapped_libraries() -> list[set[str]]:
    """What each process that has torch and runs in the guest maps, by path in the guest."""
    found = []
    for process in psutil.process_iter():
        try:
            paths = {mapping.path for mapping in process.memory_maps(grouped=True)}
        except (psutil.Error, OSError):
            continue
        if any("qemu-aarch64" in path for path in paths) and any("libtorch_cpu" in path for path in paths):
            found.append({re.sub(r".*?(/(?:usr|opt)/)", r"\1", path) for path in paths})
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """What this machine answers."""
    log = tmp_path_factory.mktemp("native") / "server.log"
    with Server(TRAINED_MODEL, log, arguments=EAGER, environment=FORCED) as native:
        native.wait_until_ready(READY_SECONDS)
        return greedy_answers(native.url, str(TRAINED_MODEL), timeout=120)


def test_greedy_tokens_are_those_of_this_machine(arm_server: ArmRoot, expected: list[Answer], tmp_path: Path) -> None:
    with emulated_server(arm_server, tmp_path / "emulated.log", cpu="v2") as url:
        libraries = mapped_libraries()
        actual = greedy_answers(url, GUEST_MODEL, timeout=900)

    log = (tmp_path / "emulated.log").read_text()
    assert f"vllm-arm {vllm_arm.__version__} is active" in log
    assert "rms_norm=['vllm_arm', 'native']" in log
    assert "attention runs on vllm-arm's sve kernel" in log
    assert "linear layers in bfloat16: vllm_arm, panel_linear bf16" in log
    with_mimalloc = [paths for paths in libraries if any("libmimalloc" in path for path in paths)]
    assert len(with_mimalloc) >= 2, "EngineCore and the worker"
    for paths in with_mimalloc:
        runtimes = {path for path in paths if "libgomp" in path}
        assert len(runtimes) == 1, runtimes
        assert "torch" not in runtimes.pop(), "the one with LSE atomics"

    compared, different = compare(expected, actual)
    print(f"{different} of {compared} tokens differ, each at a near tie")


def test_bfloat16_is_served_without_its_instructions(
    arm_server: ArmRoot, expected: list[Answer], tmp_path: Path
) -> None:
    """On a Neoverse N1, where most of vLLM's own operators are illegal instructions."""
    with emulated_server(arm_server, tmp_path / "emulated.log", cpu="n1") as url:
        actual = greedy_answers(url, GUEST_MODEL, timeout=900)

    log = (tmp_path / "emulated.log").read_text()
    assert "attention runs on vllm-arm's neon kernel" in log
    assert "linear layers in bfloat16: vllm_arm, panel_linear neon" in log
    compared, different = compare(expected, actual)
    print(f"{different} of {compared} tokens differ, each at a near tie")


@pytest.mark.parametrize(
    ("option", "group"),
    [("--tensor-parallel-size", "tp"), ("--pipeline-parallel-size", "pp")],
    ids=["tensor", "pipeline"],
)
def test_two_ranks_give_the_same_tokens(
    arm_server: ArmRoot, expected: list[Answer], tmp_path: Path, option: str, group: str
) -> None:
    log = tmp_path / "emulated.log"
    with emulated_server(arm_server, log, cpu="v2", options=(option, "2")) as url:
        actual = greedy_answers(url, GUEST_MODEL, timeout=900, prompts=PROMPTS_OF_TWO_RANKS)
    assert f"collectives of group {group}:0, 2 ranks: shared memory" in log.read_text()
    compared, different = compare(expected[:PROMPTS_OF_TWO_RANKS], actual)
    print(f"{different} of {compared} tokens differ, each at a near tie")
