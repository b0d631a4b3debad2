# SPDX-License-Identifier: Apache-2.0
"""The Arm processors that the rig can pose as."""

from __future__ import annotations

from dataclasses import dataclass, replace

BASE_FEATURES = "fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"


@dataclass(frozen=True)
class CpuModel:
    """One processor: how QEMU emulates it and what the guest's /proc and /sys say of it."""

    name: str
    qemu_cpu: str
    midr: int
    features: str
    sve_bits: int
    description: str

    @property
    def implementer(self) -> int:
        """Implementer code, bits 31:24 of MIDR_EL1."""
        return self.midr >> 24

    @property
    def variant(self) -> int:
        """Major revision, bits 23:20 of MIDR_EL1."""
        return (self.midr >> 20) & 0xF

    @property
    def part(self) -> int:
        """Part number, bits 15:4 of MIDR_EL1."""
        return (self.midr >> 4) & 0xFFF

    @property
    def revision(self) -> int:
        """Minor revision, bits 3:0 of MIDR_EL1."""
        return self.midr & 0xF

    def with_midr(self, midr: int) -> CpuModel:
        """The same instructions under another core's identity."""
        return replace(self, midr=midr)


# QEMU computes pointer authentication in software and Debian's CPython uses it in every call:
# without pauth=off all of Python is about five times slower.
_MAX = "max,pauth=off,sme=off"
_MATRIX = f"{BASE_FEATURES} sha3 asimdfhm dit uscat ilrcpc flagm ssbs sb dcpodp flagm2 frint"

CPU_MODELS = {
    model.name: model
    for model in (
        CpuModel(
            "n1",
            "neoverse-n1",
            0x413FD0C1,
            f"{BASE_FEATURES} ssbs",
            0,
            "Neoverse N1 (Graviton2, Altra): no bf16, no i8mm, no SVE",
        ),
        CpuModel(
            "neon",
            f"{_MAX},sve=off",
            0xC00FAC30,
            f"{_MATRIX} i8mm bf16",
            0,
            "bf16 and i8mm without SVE (AmpereOne)",
        ),
        CpuModel(
            "v2",
            f"{_MAX},sve128=on,sve256=off,sve512=off",
            0x410FD4F0,
            f"{_MATRIX} sve sve2 svei8mm svebf16 i8mm bf16",
            128,
            "Neoverse V2 (Graviton4, Grace, Axion): SVE at 128 bit",
        ),
        CpuModel(
            "v1",
            f"{_MAX},sve128=on,sve256=on,sve512=off,sve-default-vector-length=32",
            0x411FD401,
            f"{_MATRIX} sve svei8mm svebf16 i8mm bf16",
            256,
            "Neoverse V1 (Graviton3): SVE at 256 bit (QEMU also reports SVE2)",
        ),
    )
}


def cpu_model(name: str) -> CpuModel:
    """The model called `name`; ValueError lists the known ones."""
    try:
        return CPU_MODELS[name]
    except KeyError:
        known = ", ".join(CPU_MODELS)
        raise ValueError(f"unknown CPU model {name!r}: expected one of {known}") from None
