# SPDX-License-Identifier: Apache-2.0
"""The settings that the accuracy benchmark compares, and what it asks of each."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """``arguments`` are those of ``vllm serve`` that make it."""

    name: str
    arguments: tuple[str, ...]


BASELINE = Setting("bfloat16", ("--dtype", "bfloat16"))
TABLE = (
    BASELINE,
    Setting("arm_int8", ("--quantization", "arm_int8")),
    Setting("arm_int4", ("--quantization", "arm_int4")),
    Setting("fp8-kv", ("--kv-cache-dtype", "fp8")),
    Setting("int8-kv", ("--kv-cache-dtype", "int8_per_token_head")),
)


def select(names: str | None, own: Sequence[str]) -> list[Setting]:
    """The baseline, then those of the table that ``names`` has (by comma; None: all), then the user's ``own``.

    Each of ``own`` is ``NAME=ARGUMENTS``, as a shell would have them. Raises ``ValueError`` naming the option.
    """
    known = [setting.name for setting in TABLE]
    wanted = known if names is None else [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"--settings: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    chosen = [setting for setting in TABLE if setting == BASELINE or setting.name in wanted]
    for text in own:
        name, equals, arguments = text.partition("=")
        if not (name and equals and arguments.strip()):
            raise ValueError(f"--setting: expected NAME=ARGUMENTS, such as 'awq=--model FOLDER', got {text!r}")
        if name in [setting.name for setting in chosen]:
            raise ValueError(f"--setting: {name} is there already")
        chosen.append(Setting(name, tuple(shlex.split(arguments))))
    return chosen


@dataclass(frozen=True)
class Questions:
    """What every setting is asked about ``windows`` pieces of held-out text of ``length`` tokens.

    It continues the first ``prompt_tokens`` of ``prompts`` of them by ``tokens``. ``text`` is a file to take the pieces
    from, None for what the model of the tests has not seen; ``tasks`` are those of lm-eval and of
    ``task_folder``, ``limit`` the examples of each.
    """

    windows: int
    length: int
    prompts: int
    prompt_tokens: int
    tokens: int
    text: Path | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    task_folder: Path | None = None

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return values | {"tasks": list(self.tasks)}
