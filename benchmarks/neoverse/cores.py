# SPDX-License-Identifier: Apache-2.0
"""The cores that are modelled: how the emulated server poses as each, and LLVM's name for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Core:
    """One core.

    ``guest`` is the emulated CPU (see tests/emulation) and ``midr`` the identity it shows, by which vLLM, torch and
    oneDNN choose kernels and guess cache sizes. ``isas`` are our kernel variants that the core can run, and
    ``vector_bits`` is its SVE vector length, 0 without SVE.
    """

    name: str
    llvm: str
    guest: str
    midr: int
    isas: tuple[str, ...]
    vector_bits: int


_EVERY_ISA = ("portable", "neon", "bf16", "sve")

CORES = {
    core.name: core
    for core in (
        Core("N1", "neoverse-n1", "n1", 0x413FD0C1, _EVERY_ISA[:2], 0),
        Core("V1", "neoverse-v1", "v1", 0x411FD401, _EVERY_ISA, 256),
        Core("N2", "neoverse-n2", "v2", 0x410FD490, _EVERY_ISA, 128),
        Core("V2", "neoverse-v2", "v2", 0x410FD4F0, _EVERY_ISA, 128),
    )
}
# Our own kernels are counted here, and on others only where the count would differ.
MAIN_CORE = CORES["V2"]

# A Graviton4's share of memory bandwidth per core and cycle when all its cores are busy.
GRAVITON4_BYTES_PER_SECOND = 465e9
GRAVITON4_CORES = 96
GRAVITON4_HERTZ = 2.8e9
MEMORY_BYTES_PER_CYCLE = GRAVITON4_BYTES_PER_SECOND / GRAVITON4_CORES / GRAVITON4_HERTZ
