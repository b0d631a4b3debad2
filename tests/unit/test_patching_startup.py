# SPDX-License-Identifier: Apache-2.0
"""What the start-up file costs every interpreter, and that it does nothing else."""

import json
import statistics

from tests.unit.patching_helpers import REPOSITORY, run_python

LINE = (REPOSITORY / "vllm_arm.pth").read_text()
RUNS = 15
LIMIT_MS = 2.0

# Without site, so that no vllm_arm.pth of this environment has run.
MEASURE = f"""
import sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
before = set(sys.modules)
start = time.perf_counter_ns()
exec({LINE!r})
elapsed = time.perf_counter_ns() - start
after = set(sys.modules)
import json
print(json.dumps([elapsed / 1e6, sorted(after - before)]))
"""


def test_the_start_up_file_is_one_import_line():
    assert LINE.startswith("import vllm_arm.startup")
    assert LINE.count("\n") == 1


def test_a_start_costs_little_and_imports_nothing_else(tmp_path):
    milliseconds = []
    for _ in range(RUNS):
        result = run_python("", site=tmp_path, arguments=("-S", "-c", MEASURE))
        elapsed, modules = json.loads(result.stdout)
        assert modules == ["vllm_arm", "vllm_arm.startup"]
        milliseconds.append(elapsed)
    assert statistics.median(milliseconds) < LIMIT_MS


def test_other_imports_bring_in_nothing_of_vllm_arm(tmp_path):
    (tmp_path / "vllmish.py").write_text("")
    code = f"{LINE}import sys, decimal, vllmish; print([m for m in sys.modules if m.startswith('vllm_arm')])"
    result = run_python(code, site=tmp_path)
    assert result.stdout == "['vllm_arm', 'vllm_arm.startup']\n"


def test_the_finder_is_installed_once_and_first(tmp_path):
    code = LINE * 2 + (
        "import sys; print([type(finder).__name__ for finder in sys.meta_path].count("
        "'OverlayFinder'), sys.meta_path[0] is vllm_arm.startup.installed_finder())"
    )
    assert run_python(code, site=tmp_path).stdout == "1 True\n"
