# SPDX-License-Identifier: Apache-2.0
"""Asks whole engines, made one after the other by the program ``tests.integration.attention_engines``."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.serving import FORCED
from vllm_arm import envs

PROJECT = Path(__file__).resolve().parents[2]
# On x86 with AMX even stock vLLM needs the tiles that vllm-arm requests.
STOCK = FORCED | dict.fromkeys(envs.switches(), "0")

Results = dict[str, dict[str, Any]]
Engine = dict[str, Any]


def engine(name: str, model: Path, *questions: str, **arguments: Any) -> Engine:
    """An engine of ``model``, with ``arguments`` of ``LLM``, and the questions to ask it."""
    usual = {"model": str(model), "enforce_eager": True, "max_model_len": 1024}
    return {"name": name, "arguments": usual | arguments, "questions": questions}


def ask(engines: list[Engine], environment: dict[str, str], folder: Path) -> Results:
    """The answers of each engine, by its name and the question's; ``folder`` is made, for what they write."""
    folder.mkdir()
    request = folder / "request.json"
    request.write_text(json.dumps(engines))
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.attention_engines", str(request), str(folder)],
        cwd=PROJECT,
        env={
            **os.environ,
            **environment,
            "HF_HUB_OFFLINE": "1",
            # The engine runs in the process that asks it. Log probabilities are compiled even in eager mode.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    print(done.stdout)
    return {each["name"]: json.loads((folder / f"{each['name']}.json").read_text()) for each in engines}
