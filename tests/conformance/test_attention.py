# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of its attention ops, run on ours."""

import os
from pathlib import Path

import pytest

from tests.conformance import upstream

pytestmark = pytest.mark.slow

TEST = "tests/kernels/attention/test_cpu_attn.py"
ALL = 2774
"""Cases that vLLM 0.32.0 has."""
SKIPPED_RIGHTLY = (
    "zentorch_sdpa requires",  # an op for another maker's CPUs
    "native FP8 PV requires",  # the test itself leaves these out
    "FP8 KV cache only supported on x86",  # and these on Arm, where the test cannot know that we do
)


def test_vllms_attention_tests(tmp_path: Path) -> None:
    report = upstream.run(TEST, "attention_plugin.py", tmp_path)
    assert all(reason.startswith(SKIPPED_RIGHTLY) for reason in report.skipped), set(report.skipped)
    if os.environ.get("VLLM_ARM_CONFORMANCE") == "all":
        assert report.cases == ALL
    # Each case writes a cache and attends twice, with a schedule for each.
    assert report.counts["write_kv_cache"] >= report.passed
    assert report.counts["paged_attention"] == report.counts["schedule_attention"] >= 2 * report.passed - 1
