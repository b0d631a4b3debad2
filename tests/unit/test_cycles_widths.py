# SPDX-License-Identifier: Apache-2.0
"""How many bytes an instruction moves."""

from __future__ import annotations

import pytest

from benchmarks.neoverse.widths import Access, access

LOADS = {
    "ldr x0, [x1]": 8,
    "ldr w0, [x1, #4]!": 4,
    "ldr q0, [x1, x2]": 16,
    "ldr q0, #1024": 16,
    "ldrb w0, [x1]": 1,
    "ldrsh x0, [x1]": 2,
    "ldrsw x0, [x1]": 4,
    "ldurb w0, [x1, #-1]": 1,
    "ldur d0, [x1, #-8]": 8,
    "ldp x29, x30, [sp], #32": 16,
    "ldp q0, q1, [x1]": 32,
    "ldpsw x0, x1, [x2]": 8,
    "ldnp d0, d1, [x1]": 16,
    "ldar w0, [x1]": 4,
    "ldarb w0, [x1]": 1,
    "ldaxr x0, [x1]": 8,
    "ldaxp x0, x1, [x2]": 16,
    "ld1 { v0.4s }, [x0]": 16,
    "ld1 { v0.16b, v1.16b, v2.16b, v3.16b }, [x0], #64": 64,
    "ld1 { v30.8h - v1.8h }, [x0]": 64,
    "ld1 { v0.s }[1], [x0]": 4,
    "ld2 { v0.4h, v1.4h }, [x0]": 16,
    "ld1r { v0.8h }, [x0]": 2,
    "ld2r { v0.8h, v1.8h }, [x0]": 4,
    "ldr z0, [x0]": 32,
    "ldr p0, [x0]": 4,
    "ld1w { z0.s }, p0/z, [x0]": 32,
    "ld1w { z0.d }, p0/z, [x0]": 16,
    "ld1sb { z0.s }, p0/z, [x0]": 8,
    "ld1h { z0.h }, p0/z, [x0, x1, lsl #1]": 32,
    "ld2w { z0.s, z1.s }, p0/z, [x0]": 64,
    "ldnt1b { z0.b }, p0/z, [x0]": 32,
    "ld1rqw { z0.s }, p0/z, [x0]": 16,
    "ld1rw { z0.s }, p0/z, [x0]": 4,
}
STORES = {
    "str wzr, [x0]": 4,
    "strb w0, [x1]": 1,
    "sturh w0, [x1]": 2,
    "stp xzr, xzr, [x0]": 16,
    "stp q0, q1, [x0, #32]": 32,
    "stxr w0, x1, [x2]": 8,
    "stlr x0, [x1]": 8,
    "st1 { v0.h }[7], [x0]": 2,
    "st1 { v0.2d, v1.2d }, [x0]": 32,
    "st1w { z0.s }, p0, [x0]": 32,
    "st1h { z0.s }, p0, [x0]": 16,
    "str z0, [x0, #1, mul vl]": 32,
    "dc zva, x0": 64,
}
ATOMICS = {
    "ldaddal w0, w1, [x2]": 4,
    "swpb w0, w1, [x2]": 1,
    "casal x0, x1, [x2]": 8,
    "caspal x0, x1, x2, x3, [x4]": 16,
}
NOTHING = ["add x0, x1, x2", "prfm pldl1keep, [x0]", "dc civac, x0", "prfw pldl1keep, p0, [x0]", "b #8"]


@pytest.mark.parametrize(("text", "size"), LOADS.items(), ids=LOADS.keys())
def test_loads(text: str, size: int) -> None:
    assert access(text, vector_bits=256) == Access(loaded=size)


@pytest.mark.parametrize(("text", "size"), STORES.items(), ids=STORES.keys())
def test_stores(text: str, size: int) -> None:
    assert access(text, vector_bits=256) == Access(stored=size)


@pytest.mark.parametrize(("text", "size"), ATOMICS.items(), ids=ATOMICS.keys())
def test_atomics_load_and_store(text: str, size: int) -> None:
    assert access(text, vector_bits=0) == Access(size, size)


@pytest.mark.parametrize("text", NOTHING)
def test_the_rest_moves_nothing(text: str) -> None:
    assert access(text, vector_bits=128) == Access()


def test_sve_follows_the_vector_length() -> None:
    assert access("ld1w { z0.s }, p0/z, [x0]", 128) == Access(loaded=16)
