# SPDX-License-Identifier: Apache-2.0
"""Whether two engines gave the same greedy tokens, where rounding may decide a near tie."""

from collections.abc import Iterable
from typing import Any, NamedTuple

NEAR_TIE = 0.05
"""Where the first engine's two best logits are nearer than this, rounding may decide."""
DIFFERENT_TOKENS = 0.01
"""The share of tokens that may differ so."""


class Answer(NamedTuple):
    """The tokens of a greedy completion, and by how much each beat the second best (in nats)."""

    tokens: list[Any]
    margins: list[float]


class Comparison(NamedTuple):
    """How many tokens were compared, and how many of them differ, each at a near tie."""

    compared: int
    different: int


def compare(
    expected: Iterable[Answer], actual: Iterable[Answer], near_tie: float = NEAR_TIE, share: float = DIFFERENT_TOKENS
) -> Comparison:
    """Compare each completion up to its first different token: what follows has another prompt.

    Raises ``AssertionError`` where that is no near tie, or where more than ``share`` differ.
    """
    compared = different = 0
    for wanted, given in zip(expected, actual, strict=True):
        for position, (token, other) in enumerate(zip(wanted.tokens, given.tokens, strict=True)):
            compared += 1
            if token != other:
                assert wanted.margins[position] < near_tie, (position, token, other, wanted.margins[position])
                different += 1
                break
    assert compared, "nothing to compare"
    assert different <= share * compared, f"{different} of {compared} tokens differ"
    return Comparison(compared, different)
