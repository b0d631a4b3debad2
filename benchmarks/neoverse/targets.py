# SPDX-License-Identifier: Apache-2.0
"""What our kernels are meant to reach in modelled cycles: against vLLM's op, the peak, and themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.neoverse.measure import Record

# Of vLLM's cycles on V2, V1 and N2, at most; where there is one limit, it is V2's.
_OF_UPSTREAM: dict[str, tuple[float, ...]] = {
    "attention/prefill_512": (0.50, 0.50, 0.55),
    "attention/chunk_64_of_1024": (0.45, 0.45, 0.50),
    "attention/mixed": (0.50, 0.50, 0.55),
    "attention/decode_2k": (0.60, 0.60, 0.65),
    "attention/decode_mha": (0.60, 0.60, 0.65),
    "attention/decode_d64": (0.60, 0.60, 0.65),
    "cache_write/prefill_4096": (0.25, 0.25, 0.25),
    "cache_write/decode_64": (0.25, 0.25, 0.25),
    "cache_write/decode_d256_16": (0.25, 0.25, 0.25),
    "all_reduce/prefill_32_of_2": (0.80, 0.80, 0.80),
    "all_reduce/prefill_32_of_4": (0.80, 0.80, 0.80),
    "linear/int4_512_m1": (0.80,),
    "linear/int4_512_m16": (0.90,),
    "linear/int4_512_m128": (0.85,),
    "linear/int4_g32_512_m1": (0.80,),
    "linear/int4_g32_512_m16": (0.90,),
    "linear/int4_g32_512_m128": (0.85,),
    "linear/bf16_512_m1": (0.60,),
    "linear/bf16_512_m16": (0.90,),
    "linear/bf16_512_m128": (1.00,),
    "linear/bf16_2048_m1": (0.60,),
    "linear/int8_512_m1": (0.60,),
    "linear/int8_512_m16": (0.80,),
    "linear/int8_512_m128": (0.80,),
    "linear/int8_2048_m1": (0.60,),
}
_CORES = ("V2", "V1", "N2")
# Of the cycles of a bf16 cache, at most.
_QUANTISED = {case: ("attention/decode_2k", 1.3) for case in ("attention/decode_2k_fp8", "attention/decode_2k_int8")}
# vLLM's op does not run on N1: the share of the peak of FMLA there, at least.
_N1_PEAK = {"attention/prefill_512": 0.6, "linear/bf16_512_m128": 0.75}


@dataclass(frozen=True)
class Verdict:
    """A target and what the best variant reaches; ``value`` is None where nothing was counted for it."""

    case: str
    core: str
    measure: str
    limit: float
    value: float | None
    isa: str = ""
    at_least: bool = False

    @property
    def is_met(self) -> bool | None:
        """None where nothing was counted."""
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def judge(records: Iterable[Record]) -> Iterator[Verdict]:
    """Every target, by the variant with the fewest cycles on that core."""
    best: dict[tuple[str, str], Record] = {}
    for record in records:
        if record.impl != "vllm_arm":
            continue
        place = (f"{record.op}/{record.case}", record.core)
        if place not in best or record.cycles < best[place].cycles:
            best[place] = record
    for case, limits in _OF_UPSTREAM.items():
        for core, limit in zip(_CORES, limits, strict=False):
            found = best.get((case, core))
            value = found.ratio_to_upstream if found else None
            yield Verdict(case, core, "of vLLM's cycles", limit, value, found.isa if found else "")
    for case, (plain, limit) in _QUANTISED.items():
        for core in _CORES:
            found, other = best.get((case, core)), best.get((plain, core))
            value = found.cycles / other.cycles if found and other else None
            yield Verdict(case, core, "of a bf16 cache's cycles", limit, value, found.isa if found else "")
    for case, limit in _N1_PEAK.items():
        found = best.get((case, "N1"))
        value = found.peak_fraction if found else None
        yield Verdict(case, "N1", "of the peak of FMLA", limit, value, found.isa if found else "", at_least=True)
