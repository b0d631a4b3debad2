# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of its attention ops, run on ours: alone in an empty folder, against the installed package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.conformance import sdist
from tests.downloads import DownloadError

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
    try:
        (tmp_path / Path(TEST).name).write_bytes(sdist.read_file(TEST))
    except DownloadError as error:
        pytest.skip(f"vLLM's source distribution cannot be had: {error}")
    shutil.copyfile(Path(__file__).with_name("attention_plugin.py"), tmp_path / "conftest.py")
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", "."],
        cwd=tmp_path,
        env={**os.environ, "VLLM_ARM_FORCE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]

    suite = ElementTree.parse(report).getroot()[0]
    cases = suite.findall("testcase")
    skipped = [skip.get("message") or "" for case in cases for skip in case.findall("skipped")]
    assert all(reason.startswith(SKIPPED_RIGHTLY) for reason in skipped), set(skipped)
    if os.environ.get("VLLM_ARM_CONFORMANCE") == "all":
        assert len(cases) == ALL
    passed = len(cases) - len(skipped)
    print(f"{passed} cases passed, {len(skipped)} skipped")
    calls = {each.get("name"): int(each.get("value") or 0) for each in suite.findall("properties/property")}
    # Each case writes a cache and attends twice, with a schedule for each.
    assert calls["write_kv_cache"] >= passed
    assert calls["paged_attention"] == calls["schedule_attention"] >= 2 * passed - 1
