# SPDX-License-Identifier: Apache-2.0
"""What the tests of ``vllm serve`` share."""

from pathlib import Path

import psutil

from vllm_arm import activation

TRAINED_MODEL = Path(__file__).resolve().parents[1] / "models/tiny-llama"
READY_SECONDS = 300
EAGER = ("--enforce-eager", "--max-model-len", "1024")
FORCED = {"VLLM_ARM_FORCE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""For all of our kernels: forcing changes nothing on aarch64, and elsewhere attention has to be asked for."""
if not activation.is_arm():
    FORCED["VLLM_ARM_ISA"] = "portable"


def library_names(process: psutil.Process) -> set[str]:
    """The file names of everything that ``process`` maps."""
    return {Path(mapping.path).name for mapping in process.memory_maps(grouped=True)}


def minor_faults(process: psutil.Process) -> int:
    """The page faults of ``process`` so far that needed no disk: minflt in proc(5)."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[7])
