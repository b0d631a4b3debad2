# SPDX-License-Identifier: Apache-2.0
"""What a core can do at best in the same model: matrix instructions, loads and stores without dependencies."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cases import Work
from benchmarks.neoverse.cores import Core
from benchmarks.neoverse.mca import Model

_INDEPENDENT = 24
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class Peaks:
    """Per cycle: multiply-accumulates on bf16 and on int8 operands, bytes loaded and bytes stored."""

    bf16: float
    int8: float
    loaded: float
    stored: float

    def fewest_cycles(self, work: Work) -> float:
        """Cycles below which the core cannot do the work: of its products, its loads or its stores."""
        products = work.multiply_accumulates / (self.bf16 if work.arithmetic == "bf16" else self.int8)
        return max(products, work.bytes_read / self.loaded, work.bytes_written / self.stored)


def find_peaks(model: Model, core: Core) -> Peaks:
    """Ask the model. A core without bf16 and i8mm multiplies in fp32 and by dot products."""
    if "bf16" in core.isas:
        bf16, bf16_products = "bfmmla v{}.4s, v30.8h, v31.8h", 16
        int8, int8_products = "smmla v{}.4s, v30.16b, v31.16b", 32
    else:
        bf16, bf16_products = "fmla v{}.4s, v30.4s, v31.4s", 4
        int8, int8_products = "sdot v{}.4s, v30.16b, v31.16b", 16
    probes = (bf16, int8, "ldr q{}, [x0]", "str q{}, [x0]")
    bodies = [[probe.format(register) for register in range(_INDEPENDENT)] for probe in probes]
    rates = [_INDEPENDENT / cycles for cycles in model.price(bodies, core)]
    return Peaks(rates[0] * bf16_products, rates[1] * int8_products, rates[2] * _VECTOR_BYTES, rates[3] * _VECTOR_BYTES)
