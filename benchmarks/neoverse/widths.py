# SPDX-License-Identifier: Apache-2.0
"""How many bytes an instruction loads or stores, from its assembly."""

from __future__ import annotations

import re
from dataclasses import dataclass

_REGISTER_BYTES = {"b": 1, "h": 2, "s": 4, "d": 8, "q": 16, "w": 4, "x": 8}
_ELEMENT_BYTES = {"b": 1, "h": 2, "s": 4, "d": 8, "q": 16, "w": 4}
_REGISTER = re.compile(r"([bhsdqwx])(\d+|zr)\b")
_NEON_LIST = re.compile(r"\{\s*(v\d+)\.(\d*)([bhsd])(?:\s*-\s*(v\d+)\.\w+)?([^}]*)\}(\[\d+\])?")
_SVE_REGISTERS = re.compile(r"\bz(\d+)\.([bhsdq])(?:\s*-\s*z(\d+)\.)?")
_SVE_ACCESS = re.compile(r"(?:ld|ldn|ldf|ldff|ldnf|ldnt|st|stn|stnt)(\d)(r|rq|ro)?(s?)([bhwdq])$")
_ATOMIC = re.compile(r"(?:cas|swp|ldadd|ldclr|ldeor|ldset|ldsmax|ldsmin|ldumax|ldumin)")
_PAIR = re.compile(r"(?:ld|st)(?:n|[al]*x)?p(?:sw)?$|casp")
_LITERAL = ("ldr", "ldrsw")
_CACHE_LINE = 64


@dataclass(frozen=True)
class Access:
    """Bytes loaded and stored by one execution."""

    loaded: int = 0
    stored: int = 0


def access(text: str, vector_bits: int) -> Access:
    """What the instruction moves between memory and registers.

    SVE accesses are taken as full vectors of ``vector_bits``, whatever their predicate leaves out. Prefetches move
    nothing.
    """
    mnemonic, _, operands = text.partition(" ")
    if mnemonic == "dc":
        return Access(stored=_CACHE_LINE if operands.startswith("zva") else 0)
    if not mnemonic.startswith(("ld", "st", "cas", "swp")) or ("[" not in operands and mnemonic not in _LITERAL):
        return Access()
    if _ATOMIC.match(mnemonic):
        size = _plain_bytes(mnemonic, operands)
        return Access(size, size)
    size = _access_bytes(mnemonic, operands, vector_bits // 8)
    return Access(loaded=size) if mnemonic.startswith("ld") else Access(stored=size)


def _access_bytes(mnemonic: str, operands: str, vector_bytes: int) -> int:
    if match := _NEON_LIST.match(operands):
        return _neon_list_bytes(mnemonic, match)
    if operands.startswith("{"):
        return _sve_list_bytes(mnemonic, operands, vector_bytes)
    if re.match(r"z\d+,", operands):
        return vector_bytes
    if re.match(r"p\d+,", operands):
        return vector_bytes // 8
    return _plain_bytes(mnemonic, operands)


def _neon_list_bytes(mnemonic: str, match: re.Match[str]) -> int:
    first, lanes, element, last, rest, lane = match.groups()
    if last:
        registers = (int(last[1:]) - int(first[1:])) % 32 + 1
    else:
        registers = 1 + rest.count("v")
    element_bytes = _ELEMENT_BYTES[element]
    if lane or mnemonic.endswith("r"):
        return registers * element_bytes
    return registers * element_bytes * int(lanes)


def _sve_list_bytes(mnemonic: str, operands: str, vector_bytes: int) -> int:
    parts = _SVE_ACCESS.match(mnemonic)
    registers = _SVE_REGISTERS.search(operands)
    if parts is None or registers is None:
        return 0
    count, broadcast, _, memory = parts.groups()
    memory_bytes = _ELEMENT_BYTES[memory]
    if broadcast == "r":
        return memory_bytes
    if broadcast:
        return 16 if broadcast == "rq" else 32
    element_bytes = _ELEMENT_BYTES[registers[2]]
    return int(count) * vector_bytes * memory_bytes // element_bytes


def _plain_bytes(mnemonic: str, operands: str) -> int:
    registers = _REGISTER.findall(operands.partition("[")[0])
    if mnemonic.endswith("b"):
        size = 1
    elif mnemonic.endswith("h"):
        size = 2
    elif mnemonic.endswith("sw"):
        size = 4
    else:
        # An exclusive store's status register comes first, so the last one holds the data.
        size = _REGISTER_BYTES[registers[-1][0]] if registers else 0
    return size * (2 if _PAIR.match(mnemonic) else 1)
