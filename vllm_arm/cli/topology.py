# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-arm topology`` shows: the NUMA nodes, their cores, and where each worker would go."""

from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_arm.runtime.binding import BindingPlan
from vllm_arm.runtime.cgroup import format_cpu_list
from vllm_arm.runtime.topology import UNKNOWN_PACKAGE, Topology


def as_data(topology: Topology, plan: BindingPlan) -> dict[str, Any]:
    """Nodes and plan as plain data, for JSON; memory in bytes, distances in the firmware's unit (10 is local)."""
    return {
        "nodes": [
            {
                "node": node.id,
                "packages": sorted(_packages(topology, node.id)),
                "cores": len(_cores(topology, node.id)),
                "cpus": list(node.cpus),
                "memory_bytes": node.memory_bytes,
                "distances": list(node.distances),
            }
            for node in topology.nodes
        ],
        "allowed_cpus": sorted(topology.allowed),
        "ranks": [
            {
                "rank": rank.rank,
                "cpus": list(rank.cpus),
                "nodes": list(rank.nodes),
                "memory_nodes": list(rank.memory_nodes),
            }
            for rank in plan.ranks
        ],
        "engine_cpus": list(plan.engine_cpus),
        "reasons": list(plan.reasons),
        "warnings": [*topology.notes, *plan.warnings],
    }


def show(console: Console, topology: Topology, plan: BindingPlan) -> None:
    """Print nodes and plan as two tables, then the reasons and warnings."""
    nodes = _table("NUMA node", "Package", "Cores", "CPUs", "Memory", "Distance to each node")
    for node in topology.nodes:
        memory = f"{node.memory_bytes / 2**30:.1f} GiB" if node.memory_bytes else "none"
        nodes.add_row(
            str(node.id),
            format_cpu_list(_packages(topology, node.id)) or "unknown",
            str(len(_cores(topology, node.id))),
            format_cpu_list(node.cpus) or "none",
            memory,
            " ".join(map(str, node.distances)) or "unknown",
        )
    console.print(nodes)
    console.print()
    ranks = _table("Process", "CPUs", "NUMA node", "Memory of node")
    for rank in plan.ranks:
        places = (rank.cpus, rank.nodes, rank.memory_nodes)
        ranks.add_row(f"worker {rank.rank}", *(format_cpu_list(place) for place in places))
    node_of = {cpu.id: cpu.node for cpu in topology.cpus}
    engine_nodes = format_cpu_list(node_of[cpu] for cpu in plan.engine_cpus)
    ranks.add_row("EngineCore, API server", format_cpu_list(plan.engine_cpus) or "shared", engine_nodes, "")
    console.print(ranks)
    console.print()
    for reason in plan.reasons:
        console.print(reason, highlight=False)
    for warning in (*topology.notes, *plan.warnings):
        console.print(f"[yellow]warning[/yellow]: {warning}", highlight=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _packages(topology: Topology, node: int) -> set[int]:
    return {cpu.package for cpu in topology.cpus if cpu.node == node} - {UNKNOWN_PACKAGE}


def _cores(topology: Topology, node: int) -> set[int]:
    return {cpu.core for cpu in topology.cpus if cpu.node == node}
