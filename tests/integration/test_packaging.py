# SPDX-License-Identifier: Apache-2.0
"""Building, installing and removing the package, in an environment that borrows this one's dependencies."""

import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parents[2]
SOURCES = ("CMakeLists.txt", "LICENSE", "MANIFEST.in", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.py")
FOLDERS = ("cmake", "csrc", "vllm_arm")
SEES_PLUGIN = (
    "import sys; from importlib.metadata import entry_points as e;"
    "print([p.load()() for p in e(group='vllm.platform_plugins') if p.name == 'vllm_arm'],"
    " any('OverlayFinder' in repr(f) for f in sys.meta_path))"
)


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    # The interpreter's own folder first: cmake and ninja are beside it.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PATH": path, "PYTHONPATH": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, as a clone would have them: without what was built here."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copy2(PROJECT / name, copy)
    shutil.copy2(PROJECT / "vllm_arm.pth", copy)
    for folder in FOLDERS:
        shutil.copytree(PROJECT / folder, copy / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return copy


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment that sees this one's packages, all but vllm-arm itself."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=True)
    # Python 3.11 puts an old setuptools into the environment, in the way of the borrowed one.
    run(folder / "bin/python", "-m", "pip", "uninstall", "--yes", "setuptools")
    packages = site_packages(folder)
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    # Debian's Python names folders that a virtual environment does not have.
    for directory in filter(Path.is_dir, map(Path, site.getsitepackages())):
        for entry in directory.iterdir():
            if "vllm_arm" not in entry.name and entry.suffix != ".pth" and not entry.name.startswith("pip"):
                (borrowed / entry.name).symlink_to(entry)
    (packages / "borrowed.pth").write_text(f"{borrowed}\n")
    return folder


def site_packages(environment: Path) -> Path:
    return next(environment.glob("lib/python3.*/site-packages"))


def content(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def check_installed(environment: Path) -> None:
    python = environment / "bin/python"
    assert run(python, "-c", SEES_PLUGIN, VLLM_ARM_FORCE="1").strip() == "['vllm_arm.platform.ArmCpuPlatform'] True"
    if os.uname().machine != "aarch64":
        assert run(python, "-c", SEES_PLUGIN, VLLM_ARM_FORCE="0").strip() == "[None] True"
    isa = "from vllm_arm import _host, ops; print(ops.active_isa('rms_norm') in _host.operations()['rms_norm'])"
    assert run(python, "-c", isa).strip() == "True"
    assert run(python, "-c", "from vllm_arm import ops; print(ops.onednn_version())").startswith("3.")
    assert "vllm-arm, version" in run(environment / "bin/vllm-arm", "--version")


def check_removed(environment: Path, before: set[str]) -> None:
    python = environment / "bin/python"
    run(python, "-m", "pip", "uninstall", "--yes", "vllm-arm")
    assert content(site_packages(environment)) == before
    assert not (environment / "bin/vllm-arm").exists()
    probe = "import sys; print([m for m in sys.modules if m.startswith('vllm')], len(sys.meta_path))"
    assert run(python, "-c", probe, VLLM_ARM_FORCE="1").startswith("[] ")


def test_sdist_builds_a_wheel_that_installs_and_goes(source: Path, environment: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    pip = ("-m", "pip", "--disable-pip-version-check")
    run(sys.executable, *pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, archive)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "vllm_arm.pth" in names
    assert "vllm_arm/_C.so" in names
    if os.uname().machine == "x86_64":
        assert "vllm_arm/lib/libdnnl.so.3" in names
    assert "vllm_arm/patches/series" in names
    assert not [name for name in names if name.startswith(("tests", "demo", "csrc"))]
    before = content(site_packages(environment))
    run(environment / "bin/python", *pip, "install", "--no-deps", wheel)
    check_installed(environment)
    check_removed(environment, before)


def test_an_editable_install_follows_the_source(source: Path, environment: Path) -> None:
    before = content(site_packages(environment))
    python = environment / "bin/python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--editable", source)
    check_installed(environment)
    version = source / "vllm_arm/__init__.py"
    original = version.read_text()
    version.write_text(original.replace('"0.1.0"', '"0.1.0+edited"'))
    try:
        assert run(python, "-c", "import vllm_arm; print(vllm_arm.__version__)").strip() == "0.1.0+edited"
    finally:
        version.write_text(original)
    check_removed(environment, before)


def test_a_cross_build_without_headers_is_one_clear_line(source: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext"],
        cwd=source,
        env={**os.environ, "VLLM_ARM_CROSS_ROOT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert result.stderr.strip() == f"VLLM_ARM_CROSS_ROOT={tmp_path}: no usr/include/python3.* there"
