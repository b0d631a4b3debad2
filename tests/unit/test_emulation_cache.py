# SPDX-License-Identifier: Apache-2.0
"""One whole root per set of inputs: reused, rebuilt upon a change, built once by two processes."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from tests.emulation.cache import Say, Step, default_cache, digest_inputs, ensure_root, remove_tree

FIRST, SECOND = "0" * 16, "1" * 16


def silent(_line: str) -> None:
    """Take progress and drop it."""


def counting_steps(log: Path, seconds: float = 0) -> list[Step]:
    """A recipe of one file that adds a line to `log` each time it is followed."""

    def write(root: Path, _say: Say) -> None:
        with log.open("a") as file:
            file.write("built\n")
        time.sleep(seconds)
        (root / "content").write_text("whole")

    return [("write the content", write)]


def build(cache: Path, log: Path) -> None:
    root = ensure_root(cache, FIRST, counting_steps(log, seconds=0.3), silent)
    assert (root / "content").read_text() == "whole"


def test_a_root_is_reused_while_its_inputs_stay(tmp_path: Path) -> None:
    log, said = tmp_path / "log", []
    cache = tmp_path / "cache"
    first = ensure_root(cache, FIRST, counting_steps(log), said.append)
    assert said[0] == "write the content ..."
    assert said[1].endswith(" s")
    assert ensure_root(cache, FIRST, counting_steps(log), said.append) == first
    assert log.read_text() == "built\n"


def test_changed_inputs_build_anew_and_remove_the_old(tmp_path: Path) -> None:
    log, cache = tmp_path / "log", tmp_path / "cache"
    (cache / "usr-local").mkdir(parents=True)
    (cache / ".building-left-over").mkdir()
    ensure_root(cache, FIRST, counting_steps(log), silent)
    second = ensure_root(cache, SECOND, counting_steps(log), silent)
    assert log.read_text() == "built\nbuilt\n"
    assert (second / "content").read_text() == "whole"
    assert sorted(os.listdir(cache)) == [".lock", SECOND, "usr-local"]


def test_a_root_in_use_is_kept(tmp_path: Path) -> None:
    log, said = tmp_path / "log", []
    first = ensure_root(tmp_path / "cache", FIRST, counting_steps(log), silent)
    guest = os.open(first, os.O_RDONLY)
    fcntl.flock(guest, fcntl.LOCK_SH)
    ensure_root(tmp_path / "cache", SECOND, counting_steps(log), said.append)
    assert first.is_dir()
    assert f"kept the old {first}: it is in use" in said
    os.close(guest)
    assert remove_tree(first)
    assert not first.exists()


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(root: Path, _say: Say) -> None:
        (root / "half").write_text("")
        raise RuntimeError("the mirror is down")

    with pytest.raises(RuntimeError, match="the mirror is down"):
        ensure_root(tmp_path, FIRST, [("fail", fail)], silent)
    assert os.listdir(tmp_path) == [".lock"]


def test_two_processes_build_once(tmp_path: Path) -> None:
    log, cache = tmp_path / "log", tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    builders = [context.Process(target=build, args=(cache, log)) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(30)
    assert [builder.exitcode for builder in builders] == [0, 0]
    assert log.read_text() == "built\n"


def test_the_digest_follows_every_input(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("one")
    digests = {digest_inputs([recipe], ["torch==1", "QEMU 7"])}
    digests.add(digest_inputs([recipe], ["torch==2", "QEMU 7"]))
    digests.add(digest_inputs([recipe], ["torch==1", "QEMU 8"]))
    digests.add(digest_inputs([recipe], ["torch==1QEMU 7"]))
    recipe.write_text("two")
    digests.add(digest_inputs([recipe], ["torch==1", "QEMU 7"]))
    assert len(digests) == 5
    assert digest_inputs([recipe], ["torch==1", "QEMU 7"]) in digests


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_ARM_CACHE", str(tmp_path))
    assert default_cache() == tmp_path / "arm-root"
    monkeypatch.delenv("VLLM_ARM_CACHE")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_cache() == Path("/home/somebody/.cache/vllm-arm/arm-root")
