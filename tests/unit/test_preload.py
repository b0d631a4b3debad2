# SPDX-License-Identifier: Apache-2.0
"""LD_PRELOAD, and what is put into it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_arm.runtime import allocator, preload

MIMALLOC = "/site/cmeel.prefix/lib/libmimalloc.so.3.4"

libraries = st.lists(st.from_regex(r"(/[a-z]{1,4}){0,2}/lib[a-z]{1,6}\.so", fullmatch=True), max_size=6)


@given(libraries, libraries)
def test_prepend_keeps_order_and_loses_nothing(existing: list[str], added: list[str]) -> None:
    result = preload.parse(preload.prepend(":".join(existing), added))
    assert set(result) == {*existing, *added}
    assert len(result) == len(set(result))
    assert result[: len(set(added))] == list(dict.fromkeys(added))
    assert preload.prepend(":".join(result), added) == ":".join(result), "a second time changes nothing"


def test_spaces_separate_too() -> None:
    assert preload.parse("/a/liba.so /b/libb.so:/c/libc.so") == ["/a/liba.so", "/b/libb.so", "/c/libc.so"]


def test_remove_takes_only_the_copy_of_that_directory() -> None:
    value = "/vllm/libs/libtcmalloc_minimal-1.so.4:/usr/lib/libtcmalloc.so.4:/x/libgomp.so.1"
    assert preload.remove(value, "libtcmalloc", "/vllm/libs") == "/usr/lib/libtcmalloc.so.4:/x/libgomp.so.1"


def test_find_looks_at_file_names() -> None:
    assert preload.find("/libgomp/libother.so:/x/libgomp.so.1", ["libgomp"]) == "/x/libgomp.so.1"
    assert preload.find("", ["libgomp"]) is None


@pytest.fixture
def mimalloc(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("VLLM_ARM_MIMALLOC", raising=False)
    monkeypatch.setattr(allocator, "find_mimalloc", lambda: MIMALLOC)
    return MIMALLOC


def test_mimalloc_is_chosen(mimalloc: str) -> None:
    choice = allocator.choose("")
    assert choice.library == mimalloc
    assert not choice.is_problem
    assert allocator.choose(f"{mimalloc}:/x/libgomp.so.1").library == mimalloc, "ours stays ours in EngineCore"


def test_the_switch_turns_it_off(mimalloc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ARM_MIMALLOC", "0")
    assert allocator.choose("") == (None, "VLLM_ARM_MIMALLOC=0", False)


@pytest.mark.parametrize("name", ["libjemalloc.so.2", "libtcmalloc.so.4", "libmimalloc.so.2"])
def test_the_users_allocator_wins(mimalloc: str, name: str) -> None:
    choice = allocator.choose(f"/usr/lib/{name}")
    assert choice.library is None
    assert name in choice.reason
    assert not choice.is_problem


def test_a_missing_mimalloc_is_a_problem_that_says_what_to_install(
    mimalloc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator, "find_mimalloc", lambda: None)
    choice = allocator.choose("")
    assert choice.library is None
    assert choice.is_problem
    assert "pip install cmeel-mimalloc" in choice.reason


def test_the_installed_mimalloc_is_found() -> None:
    found = allocator.find_mimalloc()
    assert found is not None
    assert Path(found).name.startswith("libmimalloc.so.")
    assert Path(found).is_file()


def test_a_distribution_without_its_library_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "DISTRIBUTION", "pytest")
    assert allocator.find_mimalloc() is None
    monkeypatch.setattr(allocator, "DISTRIBUTION", "no-such-distribution")
    assert allocator.find_mimalloc() is None
