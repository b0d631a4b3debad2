# SPDX-License-Identifier: Apache-2.0
"""The machine and the software that a benchmark ran on, for its JSON."""

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil

import vllm_arm
from vllm_arm import _host, envs
from vllm_arm.cli import doctor
from vllm_arm.compat import VLLM_DISTRIBUTIONS

_PREFIXES = ("VLLM_", "MIMALLOC_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "ONEDNN_", "DNNL_", "TORCH")
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_NAMES = ("LD_PRELOAD", "LD_LIBRARY_PATH", "GLIBC_TUNABLES", "CPU_VISIBLE_MEMORY_NODES")


def identify() -> dict[str, Any]:
    """What makes figures comparable: CPU, memory, kernel, versions, vllm-arm's own files, the environment."""
    return {
        "cpu": cpu_name(),
        "machine": platform.machine(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": _versions(),
        "vllm_arm_sha256": _package_digest(),
        "environment": _environment(),
    }


def describe(tensor_parallel_size: int = 1) -> dict[str, Any]:
    """:func:`identify`, and everything that ``vllm-arm doctor`` finds."""
    checks = [check._asdict() for check in doctor.examine(tensor_parallel_size)]
    return {**identify(), "doctor": checks}


def is_arm() -> bool:
    """Whether vllm-arm is active here by itself."""
    return platform.system() == "Linux" and platform.machine() == "aarch64"


def needs_amx_tiles() -> bool:
    """Whether vLLM would use AMX here."""
    if platform.machine() != "x86_64":
        return False
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


def cpu_name() -> str:
    """The CPU's name: the Neoverse core on Arm, the model name elsewhere."""
    if platform.machine() == "aarch64":
        midr = _host.host_features().midr
        return f"Neoverse {_host.core_name(midr)} (MIDR_EL1 {midr:#010x})"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in (*VLLM_DISTRIBUTIONS, "vllm-arm", "torch", "transformers", "cmeel-mimalloc"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _package_digest() -> str:
    """A digest of vllm-arm's code and libraries, so that figures of another build are not taken for this one's."""
    root = Path(vllm_arm.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix in (".py", ".so", ".patch"):
            digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _environment() -> dict[str, str]:
    """The variables that matter for speed, without the switches, which the benchmark sets itself, and secrets."""
    set_by_us = {"VLLM_ARM_FORCE", *envs.switches()}
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(_PREFIXES) or name in _NAMES)
        and name not in set_by_us
        and not any(word in name for word in _SECRETS)
    }
