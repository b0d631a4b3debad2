# SPDX-License-Identifier: Apache-2.0
"""The overlay at work: fresh interpreters import a small package named vllm, and see it patched."""

import zipfile

import pytest

from tests.unit.patching_helpers import (
    ANSWERS,
    HEADERS,
    INNER,
    REPOSITORY,
    diff_of,
    make_vllm,
    patch_text,
    run_python,
    write_patches,
)

GOOD = patch_text(diff_of(ANSWERS, INNER))
OTHER_VERSION = patch_text(diff_of(ANSWERS, INNER), HEADERS | {"Target": "==0.33.*"})
MISFIT = patch_text(diff_of(INNER) + diff_of(ANSWERS).replace("-    return 'd", "-    return 'x"))
SHOW = "import vllm.answers, vllm.inner; print(vllm.answers.answer(), vllm.inner.PLACE)\n"


@pytest.fixture
def run(tmp_path):
    """Run code with the overlay and one patch; ``prepare`` may change the package first."""
    package = make_vllm(tmp_path / "site")

    def run_overlay(code, patch=GOOD, **options):
        patches = write_patches(tmp_path / "patches", {"0001-x.patch": patch})
        options = {"site": package.parent, "patches": patches} | options
        return run_python(code, **options)

    run_overlay.package = package
    return run_overlay


def contents(folder):
    return {file: file.read_bytes() for file in folder.rglob("*.py")}


def test_a_module_is_patched_as_it_is_imported(run):
    before = contents(run.package)
    result = run(SHOW + "print(vllm.answers.__file__, vllm.inner.__file__)")
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "overlay overlay",
        f"{run.package / 'answers.py'} {run.package / 'inner/__init__.py'}",
    ]
    assert contents(run.package) == before
    assert not list(run.package.rglob("__pycache__/answers*"))


def test_bytecode_is_neither_used_nor_left(run):
    assert run(SHOW, patches=None).stdout == "disk disk\n"
    cached = {file: file.read_bytes() for file in run.package.rglob("*.pyc")}
    assert len(cached) == 4
    assert run(SHOW).stdout == "overlay overlay\n"
    assert {file: file.read_bytes() for file in run.package.rglob("*.pyc")} == cached
    assert run(SHOW, patches=None).stdout == "disk disk\n"


def test_source_lines_are_the_patched_ones(run):
    code = """
import inspect, linecache, pkgutil, vllm.answers
linecache.checkcache()
print(inspect.getsource(vllm.answers.answer).split()[-1])
print(vllm.answers.__loader__.get_source('vllm.answers').count('overlay'))
print(pkgutil.get_data('vllm.answers', '_version.py')[:11])
"""
    result = run(code)
    assert result.stdout.splitlines() == ["'overlay'", "2", "b'__version__'"[:13] + "'"]


@pytest.mark.parametrize("call", ["fail()", "fail_in_thread()"])
def test_the_traceback_of_an_uncaught_error_shows_patched_source(run, call):
    result = run(f"import vllm.answers\nvllm.answers.{call}")
    assert "raise RuntimeError('overlay')" in result.stderr
    assert "disk" not in result.stderr
    assert result.stderr.rstrip().endswith("RuntimeError: overlay")
    assert ("Exception in thread Thread-1" in result.stderr) == (call == "fail_in_thread()")


def test_a_hook_for_uncaught_errors_is_kept(run):
    code = "import sys\nsys.excepthook = hook = print\nimport vllm.answers\nprint(sys.excepthook is hook)"
    assert run(code).stdout == "True\n"


def test_a_module_run_as_main_or_reloaded_is_patched(run):
    code = "import runpy, importlib; runpy.run_module('vllm.answers', run_name='__main__')\n"
    result = run(code + "import vllm.inner; print(importlib.reload(vllm.inner).PLACE)")
    assert result.stdout == "overlay\noverlay\n"


@pytest.mark.parametrize(
    ("patch", "parts"),
    [
        (OTHER_VERSION, ["0.32.0", "==0.33.*", "vllm/answers.py"]),
        (MISFIT, ["vLLM 0.32.0", "vllm/answers.py", "line 5 is"]),
        ("nonsense\n", ["malformed"]),
    ],
)
def test_a_patch_that_does_not_apply_is_skipped_with_one_warning(run, patch, parts):
    result = run(SHOW, patch)
    assert result.stdout == "disk disk\n"
    (warning,) = result.stderr.splitlines()
    for part in ["patch 0001-x.patch is skipped", *parts]:
        assert part in warning
    strict = run(SHOW, patch, env={"VLLM_ARM_STRICT": "1"})
    assert strict.returncode == 1 and strict.stdout == ""
    error = strict.stderr.splitlines()[-1]
    for part in ["PatchError: patch 0001-x.patch", *parts, "VLLM_ARM_STRICT=1"]:
        assert part in error


def test_a_child_process_does_not_repeat_the_warning(run, tmp_path):
    patches = write_patches(tmp_path / "patches", {"0001-x.patch": OTHER_VERSION})
    inner = (
        "import pathlib, vllm_arm.startup, vllm_arm.patching.series as s; "
        f"s.PATCH_DIRECTORY = pathlib.Path({str(patches)!r}); vllm_arm.startup.install(); "
    ) + SHOW
    code = f"import subprocess, sys\n{SHOW}sys.stdout.flush()\n"
    result = run(f"{code}subprocess.run([sys.executable, '-c', {inner!r}])", OTHER_VERSION)
    assert result.stdout == "disk disk\n" * 2
    assert result.stderr.count("is skipped") == 1


def test_patches_can_be_turned_off(run):
    code = SHOW + "import sys; print('unidiff' in sys.modules)"
    code = "import sys; sys.modules.pop('unidiff')\n" + code
    assert run(code, env={"VLLM_ARM_PATCHES": "0"}).stdout == "disk disk\nFalse\n"


def test_nothing_is_patched_where_vllm_arm_is_not_active(run):
    result = run("import vllm_arm.activation as a; a.is_active = lambda: False\n" + SHOW)
    assert (result.stdout, result.stderr) == ("disk disk\n", "")


def test_a_bad_value_of_a_variable_is_an_error(run):
    result = run(SHOW, env={"VLLM_ARM_PATCHES": "some"})
    assert result.stderr.splitlines()[-1] == "ValueError: VLLM_ARM_PATCHES='some': expected 0 or 1"


@pytest.mark.parametrize("strict", ["0", "1"])
def test_modules_imported_too_early_are_named(run, strict):
    early = "import sys, vllm_arm.startup\nsys.meta_path.pop(0)\nimport vllm.inner\n"
    install = "vllm_arm.startup.install()\nprint('installed', file=sys.stderr)\n"
    result = run(early + install + SHOW, env={"VLLM_ARM_STRICT": strict})
    said, installed, _ = result.stderr.partition("installed\n")
    assert "imported before it could be patched: vllm.inner" in said
    assert bool(installed) == (strict == "0")
    assert result.stdout == ("" if strict == "1" else "disk disk\n")


def test_a_namespace_package_is_left_alone(run):
    (run.package / "__init__.py").unlink()
    code = f"import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n{SHOW}"
    code = "import vllm_arm.patching.overlay\n" + code
    result = run(code)
    assert result.stdout == "disk disk\n"
    assert "vllm is a namespace package" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_package_in_a_zip_file_is_left_alone(run, tmp_path):
    archive = tmp_path / "vllm.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name, text in contents(run.package).items():
            file.writestr(str(name.relative_to(run.package.parent)), text)
    result = run(SHOW, site=archive)
    assert result.stdout == "disk disk\n"
    assert "not installed as source files" in result.stderr


def test_a_module_that_comes_from_another_file_is_left_alone(run, tmp_path):
    other = make_vllm(tmp_path / "other")
    (other / "answers.py").write_text("def answer():\n    return 'elsewhere'\n")
    code = f"import vllm; vllm.__path__.insert(0, {str(other)!r})\n{SHOW}"
    result = run(code)
    assert result.stdout == "elsewhere disk\n"
    assert f"is to be loaded from {other / 'answers.py'}" in result.stderr


@pytest.mark.parametrize(
    "breakage",
    ["(series.PATCH_DIRECTORY / 'series').unlink()", "import sys; sys.modules['vllm_arm.compat'] = None"],
)
def test_a_failure_of_the_overlay_leaves_vllm_unpatched(run, breakage):
    forget = "import sys; [sys.modules.pop(m) for m in list(sys.modules) if 'patching.' in m]\n"
    code = breakage + "\n" + (forget if "compat" in breakage else "") + SHOW
    result = run(code)
    assert result.stdout == "disk disk\n"
    (warning,) = result.stderr.splitlines()
    assert "vLLM is left unpatched, because the import overlay failed" in warning
    strict = run(code, env={"VLLM_ARM_STRICT": "1"})
    assert strict.returncode == 1 and "Error: " in strict.stderr.splitlines()[-1]


def test_looking_for_a_missing_vllm_is_silent(run):
    hide = "import sys; sys.path[:] = [p for p in sys.path if 'site' not in p]\n"
    look = "import importlib.util; print(importlib.util.find_spec('vllm'))"
    result = run("import vllm_arm.patching\n" + hide + look)
    assert (result.stdout, result.stderr) == ("None\n", "")


def test_spawned_processes_are_patched_by_the_start_up_file(run, tmp_path):
    site = run.package.parent
    patches = write_patches(tmp_path / "two", {"a.patch": OTHER_VERSION, "b.patch": GOOD})
    (site / "vllm_arm.pth").write_text((REPOSITORY / "vllm_arm.pth").read_text())
    (site / "sitecustomize.py").write_text(
        f"import pathlib, site\nsite.addsitedir({str(site)!r})\n"
        "import vllm_arm.patching.series as series\n"
        f"series.PATCH_DIRECTORY = pathlib.Path({str(patches)!r})\n"
    )
    script = tmp_path / "main.py"
    script.write_text(
        "import multiprocessing, vllm.answers\n"
        "if __name__ == '__main__':\n"
        "    print(vllm.answers.answer(), flush=True)\n"
        "    process = multiprocessing.get_context('spawn').Process(target=vllm.answers.fail)\n"
        "    process.start()\n    process.join()\n"
    )
    result = run("", arguments=(str(script),))
    assert result.stdout == "overlay\n"
    assert "raise RuntimeError('overlay')" in result.stderr
    assert result.stderr.count("is skipped") == 1
