# SPDX-License-Identifier: Apache-2.0
"""What a policy on preloaded libraries decides."""

from typing import NamedTuple


class Choice(NamedTuple):
    """The ``library`` to preload (None: leave things as they are), the ``reason``, and whether it is a shortcoming."""

    library: str | None
    reason: str
    is_problem: bool = False
