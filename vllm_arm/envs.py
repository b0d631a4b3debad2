# SPDX-License-Identifier: Apache-2.0
"""Every ``VLLM_ARM_*`` environment variable: name, default and meaning.

``from vllm_arm import envs; envs.VLLM_ARM_STRICT`` gives the value of the environment as it is now; a value that is
not understood raises ``ValueError`` naming the variable. Kept free of heavy imports: the import overlay reads it at
interpreter start.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

ISA_NAMES = ("portable", "neon", "bf16", "sve")

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


class Variable:
    """One environment variable.

    ``default`` is the value where the variable is unset or empty, ``parse`` turns its text into the value and raises
    ``ValueError`` with what was expected.
    """

    def __init__(self, default: object, parse: Callable[[str], object], meaning: str, is_switch: bool = False) -> None:
        self.default = default
        self.parse = parse
        self.meaning = meaning
        self.is_switch = is_switch

    def read(self, name: str) -> object:
        """The value that the environment gives ``name`` now. Raises ``ValueError`` on a value it cannot take."""
        text = os.environ.get(name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{name}={text!r}: expected {error}") from None


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError("0 or 1")


def _isa(text: str) -> str:
    if text not in ISA_NAMES:
        raise ValueError(f"one of {', '.join(ISA_NAMES)}")
    return text


def _seconds(text: str) -> float:
    seconds = float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else 0.0
    if not seconds:
        raise ValueError("a number of seconds above 0")
    return seconds


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _flag(default: bool, meaning: str) -> Variable:
    return Variable(default, _boolean, meaning)


def _switch(meaning: str) -> Variable:
    return Variable(True, _boolean, meaning, is_switch=True)


VARIABLES: dict[str, Variable] = {
    "VLLM_ARM_FORCE": _flag(False, "act on a machine that is not aarch64 Linux, with portable kernels"),
    "VLLM_ARM_STRICT": _flag(False, "make a patch or an op that cannot be used an error, not a warning"),
    "VLLM_ARM_ISA": Variable(
        None,
        _isa,
        "force this kernel variant (portable, neon, bf16 or sve) for every op that has it",
    ),
    "VLLM_ARM_QUANTISE_IGNORE": Variable(
        (),
        _names,
        "layers that --quantization arm_int8 and arm_int4 leave as they are: names or patterns, with commas between",
    ),
    "VLLM_ARM_QUANTISE_INCLUDE": Variable(
        (),
        _names,
        "layers that they quantise though they leave them by default, such as lm_head: names or patterns",
    ),
    "VLLM_ARM_WEIGHT_CACHE": Variable(
        None,
        lambda text: Path(text).expanduser().absolute(),
        "folder that keeps weights which were quantised while they loaded, for the next load; unset: they are not kept",
    ),
    "VLLM_ARM_COLLECTIVE_TIMEOUT": Variable(
        300.0, _seconds, "seconds after which a rank that is silent in a collective ends the server"
    ),
    "VLLM_ARM_PATCHES": _switch("patches to vLLM, applied in memory as its modules are imported"),
    "VLLM_ARM_MIMALLOC": _switch("mimalloc in place of glibc's malloc in EngineCore and the workers"),
    "VLLM_ARM_OPENMP": _switch("an OpenMP runtime with LSE atomics where torch's has none"),
    "VLLM_ARM_BINDING": _switch("binding of each worker's threads by the machine's NUMA topology"),
    "VLLM_ARM_NORM": _switch("fused RMSNorm kernels"),
    "VLLM_ARM_ATTENTION": _switch("paged attention kernels, and a quantised KV cache"),
    "VLLM_ARM_LINEAR": _switch("linear layers on weights packed while the model loads"),
    "VLLM_ARM_COLLECTIVES": _switch("collectives in shared memory for tensor, pipeline, data and expert parallelism"),
}


def switches() -> list[str]:
    """The names of the variables that each turn one optimisation off."""
    return [name for name, variable in VARIABLES.items() if variable.is_switch]


def validate() -> None:
    """Read every variable once, so that a bad value is met at start-up. Raises ``ValueError`` naming the variable."""
    for name, variable in VARIABLES.items():
        variable.read(name)


VLLM_ARM_FORCE: bool
VLLM_ARM_STRICT: bool
VLLM_ARM_ISA: str | None
VLLM_ARM_QUANTISE_IGNORE: tuple[str, ...]
VLLM_ARM_COLLECTIVE_TIMEOUT: float
VLLM_ARM_QUANTISE_INCLUDE: tuple[str, ...]
VLLM_ARM_WEIGHT_CACHE: Path | None
VLLM_ARM_PATCHES: bool
VLLM_ARM_MIMALLOC: bool
VLLM_ARM_OPENMP: bool
VLLM_ARM_BINDING: bool
VLLM_ARM_NORM: bool
VLLM_ARM_ATTENTION: bool
VLLM_ARM_LINEAR: bool
VLLM_ARM_COLLECTIVES: bool


def __getattr__(name: str) -> object:
    try:
        variable = VARIABLES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return variable.read(name)
