# SPDX-License-Identifier: Apache-2.0
"""A small package named vllm, patches for it, and interpreters in which the overlay acts on it."""

import difflib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

SOURCES = {
    "vllm/__init__.py": "from vllm._version import __version__\n",
    "vllm/answers.py": (
        "import threading\n\n\n"
        "def answer():\n    return 'disk'\n\n\n"
        "def fail():\n    raise RuntimeError('disk')\n\n\n"
        "def fail_in_thread():\n    thread = threading.Thread(target=fail)\n"
        "    thread.start()\n    thread.join()\n\n\n"
        "if __name__ == '__main__':\n    print(answer())\n"
    ),
    "vllm/inner/__init__.py": "PLACE = 'disk'\n",
    "vllm/inner/leaf.py": "VALUE = 1\n",
}

HEADERS = {
    "Description": "say overlay, not disk",
    "Author": "vllm-arm contributors",
    "Forwarded": "not-needed",
    "Last-Update": "2026-11-29",
    "Target": "==0.32.*",
    "Test": "tests/unit/test_patching_overlay.py::test_a_module_is_patched_as_it_is_imported",
    "Drop-When": "never",
}

ANSWERS = ("vllm/answers.py", "'disk'", "'overlay'")
INNER = ("vllm/inner/__init__.py", "'disk'", "'overlay'")


def make_vllm(folder: Path, version: str = "0.32.0") -> Path:
    """Write the package into ``folder`` and return its directory, ``folder / 'vllm'``."""
    for name, text in SOURCES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / "vllm/_version.py").write_text(f"__version__ = version = '{version}'\n")
    return folder / "vllm"


def diff_of(*changes: tuple[str, str, str]) -> str:
    """A unified diff that replaces, in each file of ``SOURCES`` named, the first text by the second."""
    diff = []
    for name, old, new in changes:
        before = SOURCES[name]
        assert old in before
        after = before.replace(old, new)
        diff += difflib.unified_diff(
            before.splitlines(keepends=True),
            after.splitlines(keepends=True),
            f"a/{name}",
            f"b/{name}",
            n=1,
        )
    return "".join(diff)


def patch_text(diff: str, headers: Mapping[str, str | None] = HEADERS) -> str:
    """A patch file: ``headers``, those that are None left out, and ``diff``."""
    lines = [f"{name}: {value}\n" for name, value in headers.items() if value is not None]
    return "".join(lines) + "\n" + diff


def write_patches(folder: Path, patches: Mapping[str, str]) -> Path:
    """Write a series of ``patches``, texts by file name, into ``folder`` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in patches.items():
        (folder / name).write_text(text)
    (folder / "series").write_text("# in order\n" + "".join(f"{name}\n" for name in patches))
    return folder


def run_python(
    code: str,
    *,
    site: Path,
    patches: Path | None = None,
    env: Mapping[str, str] | None = None,
    arguments: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` where the packages in ``site`` can be imported.

    With ``patches``, the overlay is installed and takes its patches from that folder.
    """
    if patches is not None:
        code = (
            "import pathlib, vllm_arm.startup, vllm_arm.patching.series as series\n"
            f"series.PATCH_DIRECTORY = pathlib.Path({str(patches)!r})\n"
            "vllm_arm.startup.install()\n"
        ) + code
    command = [sys.executable, *(arguments or ("-c", code))]
    return subprocess.run(command, env=environment(site, env), capture_output=True, text=True, timeout=120, check=False)


def environment(site: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with vllm-arm active, every other setting of it left out."""
    kept = {key: value for key, value in os.environ.items() if "VLLM_" not in key}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    paths = os.pathsep.join([str(site), str(REPOSITORY)])
    return kept | {"PYTHONPATH": paths, "VLLM_ARM_FORCE": "1"} | dict(extra or {})
