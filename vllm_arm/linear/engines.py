# SPDX-License-Identifier: Apache-2.0
"""The one table that says which engine multiplies by a weight.

An engine is chosen for a weight when it is loaded, for each has a packed format of its own; ``rows`` shows what it runs
for a number of tokens.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from vllm_arm import _host, envs, ops

Engine = Literal["vllm_arm", "onednn", "torch", "vllm"]
Scheme = Literal["bfloat16", "float16", "float32", "int8", "int4"]

SCHEMES: dict[Scheme, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
}
"""The weights that the table knows by the dtype in which they are stored; those of int4 are packed in bytes."""

ROW_BUCKETS = (1, 4, 8, 16, 32, 64, 128, 256, 2048)
"""Numbers of tokens that stand for those up to them."""


class Choice(NamedTuple):
    """``engine`` runs the layer, by what it calls ``implementation``; ``reason`` says why this one."""

    engine: Engine
    implementation: str
    reason: str


class Rule(NamedTuple):
    """A row of the table: ``engine`` is tried for ``schemes`` where this machine's best kernels are one of ``isas``.

    ``find(scheme, n, k, rows)`` gives the implementation, and raises ``ValueError`` with the reason where the engine
    has none for that weight on this CPU.
    """

    engine: Engine
    schemes: tuple[Scheme, ...]
    isas: tuple[str, ...]
    find: Callable[[Scheme, int, int, int], str]
    reason: str


class Packed(NamedTuple):
    """How to use an engine that has weights packed; the functions are those of ``vllm_arm.ops``.

    ``prepare(n, k, dtype, has_bias)`` makes what the first products would otherwise make.
    """

    pack: Callable[[torch.Tensor], torch.Tensor]
    prepare: Callable[[int, int, torch.dtype, bool], None]
    linear: Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor | None], torch.Tensor]
    linear_int8: Callable[..., torch.Tensor]
    unpack_rows: Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]


PACKED: dict[Engine, Packed] = {
    "onednn": Packed(ops.pack_linear, ops.prepare_linear, ops.linear, ops.linear_int8, ops.unpack_rows),
    "vllm_arm": Packed(
        *(ops.pack_panels, lambda *_: None, ops.panel_linear, ops.panel_linear_int8, ops.unpack_panel_rows)
    ),
}
"""The engines that have weights packed."""


def _onednn(scheme: Scheme, n: int, k: int, rows: int) -> str:
    return ops.linear_implementation(n, k, SCHEMES[scheme], rows)


def _panels(*_: object) -> str:
    return f"panel_linear {ops.active_isa('panel_linear')}"


def _int4(_: Scheme, __: int, k: int, ___: int) -> str:
    if not ops.int4_group_sizes(k):
        raise ValueError(f"int4 has no {k} inputs: expected a multiple of 32")
    return f"linear_int4 {ops.active_isa('linear_int4')}"


_ARM: tuple[str, ...] = ("neon", "bf16", "sve")

# The first row that fits and finds an implementation is taken; what no row takes is left to vLLM.
TABLE = (
    Rule(
        "torch",
        ("float32",),
        _ARM,
        lambda *_: "F.linear",
        "torch's OpenBLAS multiplies fp32 from plain weights",
    ),
    Rule("vllm_arm", ("bfloat16", "int8"), _ARM, _panels, "weights packed once, in panels"),
    Rule("onednn", ("bfloat16", "float16", "float32", "int8"), envs.ISA_NAMES, _onednn, "weights packed once"),
    Rule("vllm_arm", ("float16",), _ARM, _panels, "weights packed once, in panels"),
    Rule("vllm_arm", ("int4",), envs.ISA_NAMES, _int4, "weights packed once, in panels of four bits"),
    Rule("vllm_arm", ("int4",), _ARM, _panels, "in int8, for int4 takes a multiple of 32 inputs"),
    Rule(
        "onednn",
        ("int4",),
        envs.ISA_NAMES,
        lambda _, *shape: _onednn("int8", *shape),
        "in int8, for int4 takes a multiple of 32 inputs",
    ),
)


def machine_isa() -> str:
    """The best set of kernels that this CPU runs, under ``VLLM_ARM_ISA``."""
    return _host.select_isa(list(envs.ISA_NAMES), _host.host_features(), envs.VLLM_ARM_ISA)


def choose(scheme: Scheme, n: int, k: int, rows: int = 1, isa: str | None = None) -> Choice:
    """The engine for a weight ``[n, k]`` and what it runs for ``rows`` tokens; ``isa`` None: on this machine."""
    isa = isa or machine_isa()
    objections = []
    for rule in TABLE:
        if scheme not in rule.schemes or isa not in rule.isas:
            continue
        try:
            return Choice(rule.engine, rule.find(scheme, n, k, rows), rule.reason)
        except ValueError as error:
            objections.append(str(error))
    return Choice("vllm", "vLLM's own", "; ".join(objections) or f"no engine for {scheme} on {isa}")


def scheme_of(dtype: torch.dtype) -> Scheme | None:
    """The scheme of weights stored in ``dtype``, None for a dtype that the table does not know."""
    return next((scheme for scheme, stored in SCHEMES.items() if stored == dtype), None)


@functools.cache
def has_compute_library() -> bool:
    """Whether oneDNN was built with Arm's Compute Library."""
    package = Path(ops.__file__).parent.parent
    libraries = [*package.glob("lib/libdnnl*"), package / "_C.so"]
    return any(b"arm_compute" in library.read_bytes() for library in libraries)
