# SPDX-License-Identifier: Apache-2.0
"""Runs a file of vLLM's own tests on our ops: alone in an empty folder, against the installed package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from tests.conformance import sdist
from tests.downloads import DownloadError

HERE = Path(__file__).parent


class Report(NamedTuple):
    """How many cases ran and passed, why others were skipped, and the counts that the plugin put into the report."""

    passed: int
    skipped: list[str]
    counts: dict[str, int]

    @property
    def cases(self) -> int:
        """All that ran."""
        return self.passed + len(self.skipped)


def run(test: str, plugin: str, folder: Path, **environment: str) -> Report:
    """The report of the file ``test`` of vLLM's sources with ``plugin``, a file here, as its ``conftest.py``.

    Fails where a test does; skips where vLLM's sources cannot be had.
    """
    try:
        (folder / Path(test).name).write_bytes(sdist.read_file(test))
    except DownloadError as error:
        pytest.skip(f"vLLM's source distribution cannot be had: {error}")
    shutil.copyfile(HERE / plugin, folder / "conftest.py")
    shutil.copyfile(HERE / "sampling.py", folder / "sampling.py")
    report = folder / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", "."],
        cwd=folder,
        env=os.environ | {"VLLM_ARM_FORCE": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    suite = ElementTree.parse(report).getroot()[0]
    cases = suite.findall("testcase")
    skipped = [skip.get("message") or "" for case in cases for skip in case.findall("skipped")]
    counts = {each.get("name") or "": int(each.get("value") or 0) for each in suite.findall("properties/property")}
    print(f"{len(cases) - len(skipped)} cases passed, {len(skipped)} skipped")
    return Report(len(cases) - len(skipped), skipped, counts)
