# SPDX-License-Identifier: Apache-2.0
"""The guest's /sys and /proc/cpuinfo: only what topology readers need, posing as an Arm machine.

The host's own /sys is not shown: with x86 cache files in place oneDNN's Arm code crashes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from .cpu_models import CpuModel

CPU_DIRECTORY = "/sys/devices/system/cpu"
NODE_DIRECTORY = "/sys/devices/system/node"
LOCAL_DISTANCE, REMOTE_DISTANCE = 10, 20


@dataclass
class FileTree:
    """Files (path to content) and symbolic links (path to target) to lay into the guest."""

    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """The kernel's list format: {0, 1, 2, 5} is "0-2,5"."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def format_cpu_mask(cpus: Iterable[int], cpu_count: int) -> str:
    """The kernel's mask format: comma-separated groups of 32 bits, highest first."""
    mask = sum(1 << cpu for cpu in cpus)
    groups = max(1, -(-cpu_count // 32))
    return ",".join(f"{mask >> (32 * i) & 0xFFFFFFFF:08x}" for i in reversed(range(groups)))


def split_over_nodes(cpus: Sequence[int], nodes: int) -> list[list[int]]:
    """CPUs in contiguous, nearly equal shares; ValueError when a node would have none."""
    if not 1 <= nodes <= len(cpus):
        raise ValueError(f"nodes: expected 1 to {len(cpus)} (the number of CPUs), found {nodes}")
    ordered = sorted(cpus)
    bounds = [len(ordered) * i // nodes for i in range(nodes + 1)]
    return [ordered[a:b] for a, b in pairwise(bounds)]


def fake_sysfs(model: CpuModel, cpus: Sequence[int], nodes: int, memory: Mapping[str, int]) -> FileTree:
    """CPU and NUMA topology of one socket per node, without SMT, and MIDR_EL1 of `model`.

    `cpus` are the guest's CPU numbers; `memory` has the fields of /proc/meminfo in kB, which the
    nodes share equally.
    """
    tree = FileTree()
    count = max(cpus) + 1
    every = format_cpu_list(cpus)
    tree.files.update({f"{CPU_DIRECTORY}/{name}": every for name in ("online", "present")})
    tree.files[f"{CPU_DIRECTORY}/possible"] = every
    tree.files[f"{CPU_DIRECTORY}/kernel_max"] = str(count - 1)
    shares = split_over_nodes(cpus, nodes)
    node_list = format_cpu_list(range(nodes))
    for name in ("online", "possible", "has_cpu", "has_memory", "has_normal_memory"):
        tree.files[f"{NODE_DIRECTORY}/{name}"] = node_list
    for node, share in enumerate(shares):
        _add_node(tree, node, share, nodes, memory, count)
        for cpu in share:
            _add_cpu(tree, model, cpu, node, share, count)
    return tree


def _add_node(
    tree: FileTree,
    node: int,
    share: list[int],
    nodes: int,
    memory: Mapping[str, int],
    count: int,
) -> None:
    base = f"{NODE_DIRECTORY}/node{node}"
    tree.files[f"{base}/cpulist"] = format_cpu_list(share)
    tree.files[f"{base}/cpumap"] = format_cpu_mask(share, count)
    tree.files[f"{base}/distance"] = " ".join(
        str(LOCAL_DISTANCE if other == node else REMOTE_DISTANCE) for other in range(nodes)
    )
    used = {"MemUsed": memory["MemTotal"] - memory["MemFree"]}
    tree.files[f"{base}/meminfo"] = "\n".join(
        f"Node {node} {name + ':':<15} {size // nodes:>10} kB" for name, size in {**memory, **used}.items()
    )


def _add_cpu(tree: FileTree, model: CpuModel, cpu: int, node: int, share: list[int], count: int) -> None:
    base = f"{CPU_DIRECTORY}/cpu{cpu}"
    topology = {
        "core_id": str(cpu),
        "physical_package_id": str(node),
    }
    for names, members in (
        (("thread_siblings", "core_cpus"), [cpu]),
        (("core_siblings", "package_cpus"), share),
    ):
        for name in names:
            topology[name] = format_cpu_mask(members, count)
            topology[f"{name}_list"] = format_cpu_list(members)
    tree.files.update({f"{base}/topology/{name}": text for name, text in topology.items()})
    tree.files[f"{base}/online"] = "1"
    tree.files[f"{base}/regs/identification/midr_el1"] = f"0x{model.midr:016x}"
    tree.links[f"{base}/node{node}"] = f"../../node/node{node}"
    tree.links[f"{NODE_DIRECTORY}/node{node}/cpu{cpu}"] = f"../../cpu/cpu{cpu}"


def fake_cpuinfo(model: CpuModel, cpus: Iterable[int]) -> str:
    """The text of /proc/cpuinfo on an Arm machine with these CPUs."""
    return "\n".join(
        f"processor\t: {cpu}\n"
        "BogoMIPS\t: 100.00\n"
        f"Features\t: {model.features}\n"
        f"CPU implementer\t: 0x{model.implementer:02x}\n"
        "CPU architecture: 8\n"
        f"CPU variant\t: 0x{model.variant:x}\n"
        f"CPU part\t: 0x{model.part:03x}\n"
        f"CPU revision\t: {model.revision}\n"
        for cpu in sorted(cpus)
    )


def host_cpus() -> list[int]:
    """The CPUs that this process may use: QEMU passes affinity calls through to the host."""
    return sorted(os.sched_getaffinity(0))


def host_memory() -> dict[str, int]:
    """The fields of the host's /proc/meminfo that are in kB."""
    lines = map(str.split, Path("/proc/meminfo").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) for line in lines if line[-1] == "kB"}
