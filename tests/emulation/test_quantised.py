# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints on the emulated Arm server, with the same greedy tokens as on this machine.

One process on each side imports vLLM and makes the engines one after the other. Mixtures of experts and an adapter are
left to ``VLLM_ARM_CONFORMANCE=all``.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.emulation.conftest import GUEST_TESTS
from tests.emulation.guest import ArmRoot
from tests.emulation.launcher import Bind
from tests.integration.engines import Engine, Results, ask, engine
from tests.integration.greedy import Answer, compare
from tests.integration.serving import FORCED, TRAINED_MODEL
from tests.models.perplexity import held_out_token_windows
from tests.models.quantised import ADAPTER_RANK, add_adapter, make_merged_llama, make_mixtral, make_quantised_llama

PROMPTS, PROMPT_TOKENS = 24, 12
# Another rounding before activations become int8 moves some of them by a step, and logits of this size in bfloat16 are
# 1/16 apart.
NEAR_TIE, DIFFERENT_TOKENS = 0.07, 0.03
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "awq": ("awq", {}),
    "gptq": ("gptq", {}),
    "w8a8": ("integers", {}),
    "w4a16": ("packed", {"group_size": 128}),
    "w4a8": ("integers", {"bits": 4, "group_size": 32}),
    "fp8": ("fp8", {}),
}
ALL = os.environ.get("VLLM_ARM_CONFORMANCE") == "all"
GUEST_MODELS, GUEST_RESULTS = "/opt/models", "/opt/results"


def engines(models: Path) -> list[Engine]:
    """The engines to be asked, of checkpoints in ``models``, a folder that need not be on this machine."""
    made = [engine(name, models / name, "given", dtype="bfloat16") for name in CHECKPOINTS]
    if ALL:
        made.append(engine("experts", models / "experts", "given", dtype="bfloat16"))
        lora = {"enable_lora": True, "max_lora_rank": ADAPTER_RANK}
        made.append(engine("adapter", models / "adapter", "given", dtype="bfloat16", **lora))
    return made


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, (scheme, options) in CHECKPOINTS.items():
        make_quantised_llama(folder / name, scheme, **options)
    if ALL:
        make_mixtral(folder / "experts", "integers")
        add_adapter(make_merged_llama(folder / "adapter", scale=0))
    windows = held_out_token_windows(AutoTokenizer.from_pretrained(TRAINED_MODEL), PROMPTS, PROMPT_TOKENS)
    for model in folder.iterdir():
        (model / "prompts.json").write_text(json.dumps(windows))
    return folder


@pytest.fixture(scope="module")
def expected(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What this machine answers."""
    return ask(engines(models), FORCED, tmp_path_factory.mktemp("native") / "run")


@pytest.mark.parametrize(("cpu", "int4", "int8"), [("v2", "bf16", "bf16"), ("n1", "neon", "neon")])
def test_greedy_tokens_are_those_of_this_machine(
    arm_server: ArmRoot, models: Path, expected: Results, tmp_path: Path, cpu: str, int4: str, int8: str
) -> None:
    (tmp_path / "request.json").write_text(json.dumps(engines(Path(GUEST_MODELS))))
    binds = [
        Bind(host=str(models), guest=GUEST_MODELS, read_only=True),
        Bind(host=str(tmp_path), guest=GUEST_RESULTS, read_only=False),
    ]
    server = ArmRoot(arm_server.path, arm_server.usr_local, [*arm_server.binds, *binds])
    done = server.run(
        ["python3.13", "-m", "tests.integration.attention_engines", f"{GUEST_RESULTS}/request.json", GUEST_RESULTS],
        cpu=cpu,
        env={
            "PYTHONPATH": str(Path(GUEST_TESTS).parent),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCHDYNAMO_DISABLE": "1",
        },
        timeout=1800,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    assert f"linear layers in int8: vllm_arm, panel_linear {int8}" in output
    assert "linear layers in int4: a scale for 32 inputs, activations in int8" in output
    for name in expected:
        actual = json.loads((tmp_path / f"{name}.json").read_text())["given"]
        compared, different = compare(answers(expected[name]["given"]), answers(actual), NEAR_TIE, DIFFERENT_TOKENS)
        print(f"{cpu}, {name}: {different} of {compared} tokens differ, each at a near tie")


def answers(found: list[dict[str, Any]]) -> list[Answer]:
    return [Answer(each["tokens"], each["margins"]) for each in found]
