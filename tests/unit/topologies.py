# SPDX-License-Identifier: Apache-2.0
"""Descriptions of real servers, and fake sysfs, procfs and cgroup trees made from them.

Counts of CPUs, nodes and memory follow the machines' public descriptions; distances, CPU numbering
and package ids are what such machines typically report, and no test relies on more than their order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vllm_arm.runtime.cgroup import format_cpu_list
from vllm_arm.runtime.topology import Topology, read_topology

GIB = 1 << 30
CPU_ROOT = "sys/devices/system/cpu"
NODE_ROOT = "sys/devices/system/node"


@dataclass(frozen=True)
class Machine:
    """A machine whose packages are alike.

    CPU ids count through the packages, their nodes and cores; the second hardware thread of
    every core comes after all first threads, as Linux numbers them on x86. `memory_only` maps
    ids of nodes without CPUs to GiB. `memory_gib` is per node with CPUs, or one value for each.
    """

    packages: int
    nodes_per_package: int
    cores_per_node: int
    memory_gib: int | tuple[int, ...]
    threads: int = 1
    memory_only: dict[int, int] = field(default_factory=dict)
    memory_only_distance: int = 80
    near: int = 12
    far: int = 20
    package_ids: tuple[int, ...] = ()
    core_id_step: int = 1

    @property
    def cpu_nodes(self) -> int:
        return self.packages * self.nodes_per_package

    @property
    def cores(self) -> int:
        return self.cpu_nodes * self.cores_per_node

    @property
    def cpu_ids(self) -> range:
        return range(self.cores * self.threads)

    @property
    def node_ids(self) -> list[int]:
        return sorted({*range(self.cpu_nodes), *self.memory_only})

    def node_of(self, cpu: int) -> int:
        return cpu % self.cores // self.cores_per_node

    def package_of(self, cpu: int) -> int:
        index = self.node_of(cpu) // self.nodes_per_package
        return self.package_ids[index] if self.package_ids else index

    def memory_of(self, node: int) -> int:
        """Bytes of memory on a node."""
        if node in self.memory_only:
            return self.memory_only[node] * GIB
        gib = self.memory_gib
        return (gib if isinstance(gib, int) else gib[node]) * GIB

    def distance(self, source: int, target: int) -> int:
        if source == target:
            return 10
        if source in self.memory_only or target in self.memory_only:
            return self.memory_only_distance
        same = source // self.nodes_per_package == target // self.nodes_per_package
        return self.near if same else self.far


MACHINES = {
    "graviton2": Machine(1, 1, 64, 256),
    "graviton3": Machine(1, 1, 64, 128),
    "graviton4": Machine(1, 1, 96, 768),
    "graviton4_two_sockets": Machine(2, 1, 96, 768),
    # A GH200: node 1 is the GPU's memory, nodes 2-8 wait for its partitions and are empty.
    "grace_hopper": Machine(1, 1, 72, 480, memory_only={1: 96, **dict.fromkeys(range(2, 9), 0)}),
    "grace_grace": Machine(2, 1, 72, 240, far=40),
    # Two Grace with two GPUs each: the GPUs' memory is on nodes 2, 10, 18 and 26.
    "grace_blackwell": Machine(2, 1, 72, 480, memory_only={2: 186, 10: 186, 18: 186, 26: 186}, far=40),
    "altra_max_two_sockets": Machine(2, 1, 128, 256, core_id_step=256),
    "altra_max_quadrants": Machine(2, 4, 32, 64, core_id_step=256, near=11),
    "neoverse_v2_two_sockets": Machine(2, 1, 96, 384, package_ids=(36, 5418)),
    "cobalt100_vm": Machine(1, 1, 64, 256),
    "axion": Machine(1, 1, 72, 288),
    "x86_smt": Machine(1, 1, 2, 8, threads=2),
    "x86_two_sockets_smt": Machine(2, 1, 4, 64, threads=2),
    "cxl_expander": Machine(1, 1, 16, 64, memory_only={1: 256}, memory_only_distance=50),
    "memoryless_node": Machine(2, 1, 8, (64, 0)),
    "two_cpus": Machine(1, 1, 2, 4),
    "one_cpu": Machine(1, 1, 1, 2),
}


def put(root: Path, path: str, text: str) -> None:
    """Write a file of the fake tree, ending in a newline as the kernel's do."""
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text + "\n")


def lay(
    root: Path,
    machine: Machine,
    *,
    offline: frozenset[int] = frozenset(),
    node_directory: bool = True,
    core_topology: bool = True,
    siblings: bool = True,
) -> Path:
    """Lay the machine's sysfs and procfs below `root` and return it."""
    online = [cpu for cpu in machine.cpu_ids if cpu not in offline]
    put(root, f"{CPU_ROOT}/possible", format_cpu_list(machine.cpu_ids))
    put(root, f"{CPU_ROOT}/present", format_cpu_list(machine.cpu_ids))
    put(root, f"{CPU_ROOT}/online", format_cpu_list(online))
    put(root, f"{CPU_ROOT}/offline", format_cpu_list(offline))
    for cpu in machine.cpu_ids:
        directory = f"{CPU_ROOT}/cpu{cpu}"
        put(root, f"{directory}/online", "0" if cpu in offline else "1")
        if core_topology and cpu not in offline:
            core = cpu % machine.cores
            twins = [core + machine.cores * thread for thread in range(machine.threads)]
            in_package = core % (machine.nodes_per_package * machine.cores_per_node)
            topology = f"{directory}/topology"
            put(root, f"{topology}/physical_package_id", str(machine.package_of(cpu)))
            put(root, f"{topology}/core_id", str(in_package * machine.core_id_step))
            if siblings:
                listed = format_cpu_list(twin for twin in twins if twin not in offline)
                put(root, f"{topology}/thread_siblings_list", listed)
    if node_directory:
        lay_nodes(root, machine, online)
    total = sum(machine.memory_of(node) for node in machine.node_ids)
    put(root, "proc/meminfo", f"MemTotal:       {total // 1024} kB\nMemFree:        1024 kB")
    put(root, "proc/self/status", f"Name:\tvllm\nMems_allowed_list:\t{_all_nodes(machine)}")
    return root


def lay_nodes(root: Path, machine: Machine, online: list[int]) -> None:
    """Lay the NUMA node directories."""
    ids = machine.node_ids
    put(root, f"{NODE_ROOT}/online", format_cpu_list(ids))
    put(root, f"{NODE_ROOT}/possible", format_cpu_list(ids))
    put(root, f"{NODE_ROOT}/has_cpu", format_cpu_list(range(machine.cpu_nodes)))
    for node in ids:
        directory = f"{NODE_ROOT}/node{node}"
        cpus = [cpu for cpu in online if node < machine.cpu_nodes and machine.node_of(cpu) == node]
        put(root, f"{directory}/cpulist", format_cpu_list(cpus))
        distances = (str(machine.distance(node, other)) for other in ids)
        put(root, f"{directory}/distance", " ".join(distances))
        kib = machine.memory_of(node) // 1024
        put(
            root,
            f"{directory}/meminfo",
            f"Node {node} MemTotal:       {kib} kB\n"
            f"Node {node} MemFree:        {kib // 2} kB\n"
            f"Node {node} MemUsed:        {kib - kib // 2} kB",
        )


def _all_nodes(machine: Machine) -> str:
    return format_cpu_list(machine.node_ids) if machine.cpu_nodes > 1 else "0-63"


def mount_v2(root: Path, group: str = "/", top: str = "/", point: str = "/sys/fs/cgroup") -> Path:
    """Mount a cgroup v2 hierarchy with this process in `group`; returns the mount point."""
    put(root, "proc/self/cgroup", f"0::{group}")
    put(
        root,
        "proc/self/mountinfo",
        "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw\n"
        f"30 22 0:26 {top} {point} ro,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw",
    )
    return root / point.lstrip("/")


def mount_v1(root: Path, group: str = "/", top: str = "/", unified: bool = False) -> Path:
    """Mount the v1 controllers (and an empty v2 hierarchy if `unified`); returns their parent."""
    controllers = {"cpu,cpuacct": 40, "cpuset": 41, "memory": 42}
    lines = ["30 22 0:25 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755"]
    groups = []
    for name, number in controllers.items():
        lines.append(
            f"{number} 30 0:{number} {top} /sys/fs/cgroup/{name} rw,nosuid shared:{number} - cgroup cgroup rw,{name}"
        )
        groups.append(f"{number - 38}:{name}:{group}")
    if unified:
        lines.append("50 30 0:50 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw")
        groups.append("0::/")
    put(root, "proc/self/cgroup", "\n".join(groups))
    put(root, "proc/self/mountinfo", "\n".join(lines))
    return root / "sys/fs/cgroup"


def read_machine(root: Path, machine: Machine) -> Topology:
    """Lay a machine below `root` and read it as a process allowed on every CPU."""
    return read_topology(lay(root, machine), frozenset(machine.cpu_ids))
