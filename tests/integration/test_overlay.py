# SPDX-License-Identifier: Apache-2.0
"""The patches of the series on the vLLM that is installed."""

import ast
import base64
import csv
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_arm.compat import VLLM_DISTRIBUTIONS, vllm_directory, vllm_version
from vllm_arm.patching import validate
from vllm_arm.patching.series import PATCH_DIRECTORY, load_patch, read_series

REPOSITORY = Path(__file__).resolve().parents[2]
PATCHES = [load_patch(PATCH_DIRECTORY / name) for name in read_series()]

INSTALL = "import vllm_arm.startup\nvllm_arm.startup.install()\n"

COMMAND_LINE = (
    INSTALL
    + """
import argparse, contextlib, io, json, sys
from unittest import mock

from vllm.entrypoints.cli import main, run_batch
from vllm.snapshot import runtime
from vllm.utils.import_utils import get_vllm_optional_dependencies

printed = io.StringIO()
sys.argv = ["vllm", "--version"]
with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
    main.main()

with (
    mock.patch("vllm.entrypoints.launchers.run_batch.main"),
    mock.patch.object(run_batch, "asyncio"),
    mock.patch.object(run_batch, "logger") as logger,
):
    run_batch.RunBatchSubcommand.cmd(argparse.Namespace(enable_metrics=False))

tools = mock.MagicMock()
tools._gpu_identity.return_value = ("", "", "")
tools._torch_identity.return_value = ("", "")
with mock.patch.multiple(runtime, SnapshotRuntimeIdentity=dict, Path=mock.MagicMock()):
    identity = runtime.LocalSnapshotTools.current_identity(tools, "")

result = {
    "command line": printed.getvalue().strip(),
    "run-batch": logger.info.call_args_list[0].args[1],
    "snapshot": identity["vllm_version"],
    "extras": sorted(get_vllm_optional_dependencies()),
}
print("RESULT", json.dumps(result))
"""
)

TARGET_CPU = (
    INSTALL
    + """
import json, os
from vllm import platforms

names = []
for plugins in ("broken,other", "broken,other,ours"):
    os.environ["VLLM_PLUGINS"] = plugins
    names.append(platforms.resolve_current_platform_cls_qualname())
print("RESULT", json.dumps(names))
"""
)

EXPERTS = (
    INSTALL
    + """
import json
from unittest import mock

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

experts = mock.MagicMock(_use_zentorch=False)
ids, weights = torch.tensor([[0, 3], [2, 1]], dtype=torch.int32), torch.tensor([[0.5, 0.25], [0.75, 0.125]])
names = "output hidden_states w1 w2 a1q_scale a2_scale workspace13 workspace2 expert_tokens_meta".split()
results = []
with mock.patch.object(cpu_moe, "cpu_fused_moe") as kernel:
    for expert_map in (None, torch.tensor([-1, -1, 0, 1], dtype=torch.int32)):
        cpu_moe.CPUUnquantizedExperts.apply(
            experts, **dict.fromkeys(names), topk_weights=weights, topk_ids=ids, activation=MoEActivation.SILU,
            global_num_experts=4, expert_map=expert_map, apply_router_weight_on_input=False,
        )
        results.append([kernel.call_args.args[6].tolist(), kernel.call_args.args[7].tolist()])
print("RESULT", json.dumps(results))
"""
)

PLATFORM_PLUGINS = """
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform, PlatformEnum


class Ours(CpuPlatform):
    pass


class Other(Platform):
    _enum = PlatformEnum.OOT


def broken():
    raise OSError("no such device")


def other():
    return "platform_plugins.Other"


def ours():
    return "platform_plugins.Ours"
"""


def run_vllm(code: str, path: Path = REPOSITORY, **variables: str) -> object:
    """Run ``code`` in a fresh interpreter with the overlay and return the value after RESULT."""
    kept = {key: value for key, value in os.environ.items() if "VLLM_" not in key}
    paths = os.pathsep.join([str(path), str(REPOSITORY)])
    env = kept | {"PYTHONPATH": paths, "VLLM_ARM_FORCE": "1", "VLLM_ARM_STRICT": "1"} | variables
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def installed_files() -> dict[str, str]:
    """The SHA-256 that vLLM's distribution records for each of its files."""
    for name in VLLM_DISTRIBUTIONS:
        try:
            record = importlib.metadata.distribution(name).read_text("RECORD") or ""
        except importlib.metadata.PackageNotFoundError:
            continue
        return {row[0]: row[1].removeprefix("sha256=") for row in csv.reader(record.splitlines())}
    pytest.fail("no distribution of vLLM is installed")


def test_vllm_runs_from_a_distribution_of_any_name():
    result = run_vllm(COMMAND_LINE)
    assert isinstance(result, dict)
    assert "audio" in result.pop("extras")
    assert set(result) == {"command line", "run-batch", "snapshot"}
    for version in result.values():
        assert version.split("+")[0] == str(vllm_version())


def test_cpu_target_takes_an_out_of_tree_cpu_platform(tmp_path):
    (tmp_path / "platform_plugins.py").write_text(PLATFORM_PLUGINS)
    information = tmp_path / "platform_plugins-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: platform-plugins\n")
    entry_points = [f"{name} = platform_plugins:{name}" for name in ("broken", "other", "ours")]
    (information / "entry_points.txt").write_text("\n".join(["[vllm.platform_plugins]", *entry_points]))
    names = run_vllm(TARGET_CPU, tmp_path, VLLM_TARGET_DEVICE="cpu")
    assert isinstance(names, list)
    assert names[0].startswith("vllm.platforms.")
    assert names[1] == "platform_plugins.Ours"


def test_experts_of_other_ranks_are_left_out():
    everything, second_half = run_vllm(EXPERTS)
    assert everything == [[[0.5, 0.25], [0.75, 0.125]], [[0, 3], [2, 1]]]
    assert second_half == [[[0, 0.25], [0.75, 0]], [[0, 1], [0, 0]]]


def test_every_patch_is_for_the_installed_vllm_and_fits_it():
    assert PATCHES
    version = vllm_version()
    assert [patch.name for patch in PATCHES if not patch.target.covers(version)] == []
    assert validate() == []


def test_no_patched_file_differs_from_the_one_installed():
    recorded = installed_files()
    for patch in PATCHES:
        for file in patch.files:
            data = (vllm_directory().parent / file.path).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
            assert digest.decode().rstrip("=") == recorded[file.path], file.path


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_test_that_a_patch_names_exists(patch):
    file, *_, name = patch.test.split("::")
    tree = ast.parse((REPOSITORY / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
