# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of its oneDNN ops, run on each engine of ours that has weights packed."""

import os
from pathlib import Path

import pytest

from tests.conformance import upstream
from vllm_arm.linear import engines

pytestmark = pytest.mark.slow

TEST = "tests/kernels/test_onednn.py"
ALL = 240
"""Cases that vLLM 0.32.0 has."""


@pytest.mark.parametrize("engine", engines.PACKED)
def test_vllms_linear_tests(engine: str, tmp_path: Path) -> None:
    report = upstream.run(TEST, "linear_plugin.py", tmp_path, VLLM_ARM_CONFORMANCE_ENGINE=engine)
    assert not report.skipped
    if os.environ.get("VLLM_ARM_CONFORMANCE") == "all":
        assert report.cases == ALL
    # Each case has five numbers of tokens, with and without a bias or the one time.
    assert report.counts["linear"] + report.counts["linear_int8"] >= 5 * report.passed
    assert report.counts["linear"] and report.counts["linear_int8"]
