# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of quantised models on CPUs, run on small models in the same formats and on our layers.

Of the formats of vLLM's list, MXFP4 is left out: we have no op for it.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conformance import upstream
from tests.integration.serving import FORCED
from tests.models.quantised import make_mixtral, make_quantised_llama
from vllm_arm.linear import engines

pytestmark = pytest.mark.slow

LAYERS = 4
INT8 = "panel_linear_int8" if engines.choose("int8", 256, 256).engine == "vllm_arm" else "linear_int8"


class Model(NamedTuple):
    """``make(folder, scheme, **options)`` writes it; ``op`` of ours runs ``per_layer`` times in each layer."""

    make: Callable[..., Path]
    scheme: str
    options: dict[str, Any]
    op: str
    per_layer: int = 4

    @classmethod
    def of_experts(cls, scheme: str, **options: Any) -> "Model":
        return cls(make_mixtral, scheme, options, "run_experts", 1)


WEIGHTS_ALONE = {
    "awq": Model(make_quantised_llama, "awq", {}, "linear_int4"),
    "gptq": Model(make_quantised_llama, "gptq", {}, "linear_int4"),
    "w4a16-zero-points": Model(make_quantised_llama, "packed", {"symmetric": False}, "linear_int4"),
    "auto-round": Model(make_quantised_llama, "auto_round", {}, "linear_int4"),
    "fp8-blocks": Model(make_quantised_llama, "fp8_plain", {"blocks": True}, INT8),
    "experts-fp8-blocks": Model.of_experts("fp8_plain", blocks=True),
    "experts-awq": Model.of_experts("awq"),
    "experts-gptq": Model.of_experts("gptq"),
    "experts-w4a16": Model.of_experts("packed"),
}
WEIGHTS_AND_ACTIVATIONS = {
    "experts-w8a8": Model.of_experts("integers"),
    "w8a8": Model(make_quantised_llama, "integers", {}, INT8),
    "w4a8": Model(make_quantised_llama, "integers", {"bits": 4, "group_size": 32}, "linear_int4"),
}


def run(test: str, models: dict[str, Model], folder: Path) -> upstream.Report:
    """The report of vLLM's ``test`` on ``models``, on the first alone unless all is asked for."""
    chosen = models if os.environ.get("VLLM_ARM_CONFORMANCE") == "all" else dict(list(models.items())[:1])
    paths = [model.make(folder / "models" / name, model.scheme, **model.options) for name, model in chosen.items()]
    tests = folder / "tests"
    tests.mkdir()
    report = upstream.run(
        test,
        "models_plugin.py",
        tests,
        VLLM_ARM_CONFORMANCE_MODELS=",".join(map(str, paths)),
        **FORCED,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        TORCHDYNAMO_DISABLE="1",
    )
    assert {f"{name} {model.op}" for name, model in chosen.items()} <= report.counts.keys()
    for name, model in chosen.items():
        # The prompt gives the first token, and each but the last is computed for the next.
        steps = report.counts[f"{name} tokens"]
        assert report.counts[f"{name} {model.op}"] == steps * LAYERS * model.per_layer, name
    return report


def test_weights_alone(tmp_path: Path) -> None:
    report = run("tests/quantization/test_cpu_wna16.py", WEIGHTS_ALONE, tmp_path)
    assert report.skipped == ["PowerPC-only test"]
    assert report.counts["linear_int4"] == 2


def test_weights_and_activations(tmp_path: Path) -> None:
    report = run("tests/quantization/test_cpu_w8a8.py", WEIGHTS_AND_ACTIVATIONS, tmp_path)
    assert not report.skipped
