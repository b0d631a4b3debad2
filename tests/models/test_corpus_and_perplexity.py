# SPDX-License-Identifier: Apache-2.0
"""The corpus, its split, the windows cut from it and the arithmetic of perplexity."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.models.corpus import Corpus, Module, conversations, is_held_out, load_corpus
from tests.models.perplexity import (
    held_out_token_windows,
    perplexity_from_logprobs,
    prompt_token_logprobs,
)
from tests.models.random_llama import TINY_LLAMA

DOCUMENTED = '''"""Shapes to draw."""


class Circle:
    """A round shape.

    It has no corners.
    """

    def area(self):
        """Return the area
        in square metres."""

    def _secret(self):
        """Not for anyone to see."""


def draw():
    """No full stop here"""
'''


@dataclass
class Logprob:
    logprob: float


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(TINY_LLAMA)
    return loaded


def library(root: Path, prefix: str, held_out: int = 6) -> Path:
    """Write a library whose first modules with held-out names hold lines starting with `prefix`."""
    names = [name for name in map("module_{}".format, range(1000)) if is_held_out(name)]
    root.mkdir()
    for index, name in enumerate(names[:held_out]):
        lines = [f"{prefix}{index}_{line} = {line}" for line in range(200)]
        (root / f"{name}.py").write_text("\n".join(lines))
    return root


def test_split_is_by_name_and_about_four_percent(corpus: Corpus) -> None:
    assert {"json.decoder", "logging", "unittest.case"} <= {m.name for m in corpus.train}
    assert {"logging.handlers", "fractions", "csv"} <= {m.name for m in corpus.held_out}
    total = sum(len(m.source) for m in (*corpus.train, *corpus.held_out))
    assert sum(len(m.source) for m in corpus.held_out) / total == pytest.approx(0.04, abs=0.02)


def test_tests_tables_and_third_party_modules_are_left_out(corpus: Corpus) -> None:
    names = [module.name for module in (*corpus.train, *corpus.held_out)]
    assert len(names) == len(set(names))
    unwanted = {"test", "encodings", "pydoc_data", "site-packages", "idlelib", "tkinter"}
    assert not any(unwanted & set(name.split(".")) for name in names)
    assert not any("sysconfigdata" in name for name in names)


def test_empty_library_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="root: expected standard library sources"):
        load_corpus(tmp_path)


def test_digest_depends_on_every_text() -> None:
    one, other = Module("one", "a = 1"), Module("other", "b = 2")
    digest = Corpus((one,), (other,)).sha256()
    assert digest != Corpus((one,), (Module("other", "b = 3"),)).sha256()
    assert digest == Corpus((one,), (Module("other", "b = 2"),)).sha256()


def test_conversations_come_from_first_paragraphs_of_public_docstrings() -> None:
    messages = [m for chat in conversations([Module("shapes", DOCUMENTED)]) for m in chat]
    assert [m["content"] for m in messages if m["role"] == "user"] == [
        "What is the module `shapes` for?",
        "What is `shapes.Circle`?",
        "What does `shapes.Circle.area` do?",
    ]
    assert [m["content"] for m in messages if m["role"] == "assistant"] == [
        "Shapes to draw.",
        "A round shape.",
        "Return the area in square metres.",
    ]
    assert not list(conversations([Module("_shapes", DOCUMENTED)]))


def test_windows_have_the_length_and_number_asked_for(tokenizer: PreTrainedTokenizerBase) -> None:
    windows = held_out_token_windows(tokenizer, count=40, length=64)
    assert [len(window) for window in windows] == [64] * 40
    assert windows[0][0] == tokenizer.bos_token_id
    assert len(set(map(tuple, windows))) == 40
    assert windows[:5] == held_out_token_windows(tokenizer, count=5, length=64)


def test_an_edit_moves_only_the_windows_of_its_module(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    before = library(tmp_path / "before", "value")
    after = library(tmp_path / "after", "value")
    edited = sorted(after.iterdir())[0]
    edited.write_text("import sys\n" + edited.read_text())
    changed = [
        old != new
        for old, new in zip(
            held_out_token_windows(tokenizer, 24, 64, root=before),
            held_out_token_windows(tokenizer, 24, 64, root=after),
            strict=True,
        )
    ]
    assert sum(changed) == 4  # 24 windows of 6 modules


def test_asking_for_too_many_windows_is_an_error(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"count: expected at most \d+, .* got 100000"):
        held_out_token_windows(tokenizer, 100000, 64, root=library(tmp_path / "lib", "value"))


def test_perplexity_of_equal_chances_is_their_number() -> None:
    assert perplexity_from_logprobs([[-math.log(8)] * 3, [-math.log(8)]]) == pytest.approx(8)
    assert perplexity_from_logprobs([[-math.log(2)], [-math.log(8)]]) == pytest.approx(4)


def test_perplexity_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one log-probability"):
        perplexity_from_logprobs([[], []])


def test_prompt_token_logprobs_picks_the_prompts_own_tokens() -> None:
    entries = [None, {5: Logprob(-1.0), 9: Logprob(-0.1)}, {7: Logprob(-2.0)}]
    assert prompt_token_logprobs([3, 5, 7], entries) == [-1.0, -2.0]
    with pytest.raises(ValueError, match="each of 2 tokens, got 3"):
        prompt_token_logprobs([3, 5], entries)
