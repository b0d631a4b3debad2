# SPDX-License-Identifier: Apache-2.0
"""The guest's /sys and /proc/cpuinfo."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.emulation.cpu_models import CPU_MODELS, cpu_model
from tests.emulation.fake_system import (
    fake_cpuinfo,
    fake_sysfs,
    format_cpu_list,
    format_cpu_mask,
    host_memory,
    split_over_nodes,
)

MEMORY = {"MemTotal": 4000, "MemFree": 1000, "Active(file)": 200}
CPU, NODE = "/sys/devices/system/cpu", "/sys/devices/system/node"
cpu_sets = st.sets(st.integers(0, 200), min_size=1)


def parse_cpu_list(text: str) -> set[int]:
    result: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        result.update(range(int(first), int(last or first) + 1))
    return result


@given(cpu_sets)
def test_lists_and_masks_name_the_same_cpus(cpus: set[int]) -> None:
    assert parse_cpu_list(format_cpu_list(cpus)) == cpus
    mask = format_cpu_mask(cpus, 201)
    assert len(mask.split(",")) == 7
    bits = int(mask.replace(",", ""), 16)
    assert {bit for bit in range(224) if bits >> bit & 1} == cpus


def test_formats_are_the_kernels() -> None:
    assert format_cpu_list([5, 0, 1, 2, 7]) == "0-2,5,7"
    assert format_cpu_mask([0, 33], 40) == "00000002,00000001"


@given(cpu_sets, st.integers(1, 8))
def test_nodes_share_all_cpus_equally(cpus: set[int], nodes: int) -> None:
    if nodes > len(cpus):
        with pytest.raises(ValueError, match="nodes: expected 1 to"):
            split_over_nodes(sorted(cpus), nodes)
        return
    shares = split_over_nodes(sorted(cpus), nodes)
    assert [cpu for share in shares for cpu in share] == sorted(cpus)
    sizes = {len(share) for share in shares}
    assert max(sizes) - min(sizes) <= 1


def test_two_nodes() -> None:
    tree = fake_sysfs(CPU_MODELS["n1"], [0, 1, 2, 3], 2, MEMORY)
    files = tree.files
    assert files[f"{NODE}/online"] == "0-1"
    assert files[f"{NODE}/node1/cpulist"] == "2-3"
    assert files[f"{NODE}/node1/distance"] == "20 10"
    memory = {line.split()[2]: line.split()[3] for line in files[f"{NODE}/node1/meminfo"].split("\n")}
    assert memory["MemTotal:"] == "2000"
    assert memory["MemUsed:"] == "1500"
    assert memory["Active(file):"] == "100"
    assert files[f"{CPU}/cpu3/topology/physical_package_id"] == "1"
    assert files[f"{CPU}/cpu3/topology/core_siblings_list"] == "2-3"
    assert files[f"{CPU}/cpu3/topology/thread_siblings_list"] == "3"
    assert files[f"{CPU}/cpu3/regs/identification/midr_el1"] == "0x00000000413fd0c1"
    assert not any("cache" in path for path in files)


def test_links_lead_to_directories_that_exist() -> None:
    tree = fake_sysfs(CPU_MODELS["v2"], [0, 1], 2, MEMORY)
    directories = {posixpath.dirname(path) for path in tree.files}
    directories |= {posixpath.dirname(path) for path in directories}
    for link, target in tree.links.items():
        assert posixpath.normpath(posixpath.join(posixpath.dirname(link), target)) in directories


def test_cpuinfo_spells_the_identity_out() -> None:
    text = fake_cpuinfo(CPU_MODELS["v1"], [0, 1])
    assert text.count("processor\t: ") == 2
    for line in ("CPU implementer\t: 0x41", "CPU variant\t: 0x1", "CPU part\t: 0xd40"):
        assert line in text
    assert "CPU revision\t: 1\n" in text


def test_models_are_consistent() -> None:
    for name, model in CPU_MODELS.items():
        assert name == model.name
        assert ("sve" in model.features.split()) == (model.sve_bits > 0)
    assert CPU_MODELS["v2"].with_midr(0x410FD490).part == 0xD49
    with pytest.raises(ValueError, match="unknown CPU model 'a64fx': expected one of n1, neon"):
        cpu_model("a64fx")


def test_memory_of_this_machine() -> None:
    memory = host_memory()
    assert memory["MemTotal"] > memory["MemFree"] > 0
    assert "Active(file)" in memory
    assert "HugePages_Total" not in memory
