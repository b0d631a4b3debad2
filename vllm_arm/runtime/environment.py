# SPDX-License-Identifier: Apache-2.0
"""What EngineCore and the workers inherit: vLLM spawns them, so all of it goes through the environment.

vLLM asks for this more than once in a process, and again in EngineCore; what is settled already is left as it is.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_arm import envs
from vllm_arm.logs import get_logger
from vllm_arm.runtime import allocator, openmp, placement, preload
from vllm_arm.runtime.binding import AUTO, BIND_VARIABLE, BindingPlan, plan_binding
from vllm_arm.runtime.cgroup import format_cpu_list
from vllm_arm.runtime.topology import Topology, read_topology
from vllm_arm.startup import warn_once_in_process_tree

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

LOCAL_WORKERS = "_VLLM_ARM_LOCAL_WORKERS"
"""Not a setting: how many workers a replica has on this machine, for whoever has no configuration yet."""

# Marks a value of VLLM_CPU_OMP_THREADS_BIND as ours, where EngineCore would take it for the user's.
_OUR_BINDING = "_VLLM_ARM_BINDING"
_RESERVED_CPUS = "VLLM_CPU_NUM_OF_RESERVED_CPU"
_SIMULATED_NODES = "VLLM_CPU_SIM_MULTI_NUMA"
_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"


def preload_libraries(torch_directory: Path) -> None:
    """Put the allocator and the OpenMP runtime into ``LD_PRELOAD`` and set mimalloc's tuning."""
    before = os.environ.get("LD_PRELOAD", "")
    choices = {
        "allocator": allocator.choose(before),
        "OpenMP runtime": openmp.choose(before, torch_directory),
    }
    libraries = [choice.library for choice in choices.values() if choice.library]
    if envs.VLLM_ARM_OPENMP:
        libraries += _one_openmp_runtime(choices["OpenMP runtime"].library, before, torch_directory)
    after = preload.prepend(before, libraries)
    if choices["allocator"].library:
        for name, value in allocator.TUNING.items():
            os.environ.setdefault(name, value)
    if after != before:
        os.environ["LD_PRELOAD"] = after
        for what, choice in choices.items():
            logger.info("%s: %s (%s)", what, choice.library or "vLLM's own", choice.reason)
    for what, choice in choices.items():
        if choice.is_problem:
            warn_once_in_process_tree(f"{what}: {choice.reason}")
    if libraries and os.environ.get(_MULTIPROCESSING) == "0" and after != before:
        warn_once_in_process_tree(
            f"{_MULTIPROCESSING}=0: the engine runs in this process, which has started without "
            f"them; start it with LD_PRELOAD={':'.join(libraries)}"
        )


def _one_openmp_runtime(chosen: str | None, ld_preload: str, torch_directory: Path) -> list[str]:
    """What to preload so that packages with a libgomp of their own use the one of torch or ``chosen``."""
    runtime = chosen or preload.find(ld_preload, openmp.RUNTIMES) or openmp.torch_runtime(torch_directory)
    if runtime is None or not Path(runtime).name.startswith("libgomp"):
        return []
    copies = openmp.bundled_copies(torch_directory.parent)
    try:
        folder = openmp.link_as(Path(runtime).resolve(), copies, _cache_directory())
    except OSError as error:
        warn_once_in_process_tree(
            f"OpenMP runtime: {', '.join(copy.name for copy in copies)} may be mapped beside "
            f"{runtime}, because links cannot be made: {error}"
        )
        return []
    if folder is None:
        return []
    search_path = os.environ.get("LD_LIBRARY_PATH", "")
    if str(folder) not in search_path.split(":"):
        os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(folder), search_path]))
    return [str(runtime), *sorted(os.listdir(folder))]


def _cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "vllm-arm")


def drop_bundled_allocator(vllm_directory: Path) -> None:
    """Take the tcmalloc that vLLM's official wheels bundle out of ``LD_PRELOAD`` where mimalloc is in it."""
    value = os.environ.get("LD_PRELOAD", "")
    if allocator.is_preloaded(value):
        os.environ["LD_PRELOAD"] = preload.remove(value, "libtcmalloc", str(vllm_directory / "libs"))


def explicit_binding() -> str | None:
    """The user's value of ``VLLM_CPU_OMP_THREADS_BIND``, None where there is none or it is ``auto``."""
    value = os.environ.get(BIND_VARIABLE, AUTO)
    return None if value in ("", AUTO) or value == os.environ.get(_OUR_BINDING) else value


def plan_threads(
    ranks: int, replicas: int = 1, *, transfers_kv_cache: bool = False, topology: Topology | None = None
) -> BindingPlan:
    """Where the threads of ``ranks`` workers of each of ``replicas`` go on this machine, under its environment.

    ``transfers_kv_cache`` leaves one more CPU for each rank, for the connector. Raises ``BindingError`` on a value
    that cannot be, naming the variable.
    """
    reserved = os.environ.get(_RESERVED_CPUS)
    by_default = 2 * ranks if transfers_kv_cache else None
    return plan_binding(
        topology or read_topology(),
        ranks,
        replicas=replicas,
        reserved_cpus=int(reserved) if reserved else by_default,
        explicit=explicit_binding(),
        visible_nodes=_visible_nodes(),
    )


def bind_threads(vllm_config: "VllmConfig") -> None:
    """Set ``VLLM_CPU_OMP_THREADS_BIND`` for the workers of this machine, unless the user did.

    Raises ``BindingError`` on a user's value that cannot be.
    """
    if not envs.VLLM_ARM_BINDING or _OUR_BINDING in os.environ:
        return
    if os.environ.get(_SIMULATED_NODES, "0") != "0":
        logger.info("thread binding: left to vLLM, which simulates NUMA nodes")
        return
    parallel_config = vllm_config.parallel_config
    if parallel_config.use_ray:
        logger.info("thread binding: each worker of Ray's binds itself, on the machine that it comes to run on")
        return
    replicas = 1
    if parallel_config.data_parallel_size > 1:
        replicas = parallel_config.data_parallel_size_local
        if replicas <= (parallel_config.data_parallel_rank_local or 0):
            # One server per replica: how many share this machine is not known here.
            logger.info("thread binding: left to vLLM, for each replica has a server of its own")
            return
    plan = plan_threads(
        parallel_config.local_world_size,
        replicas,
        transfers_kv_cache=vllm_config.kv_transfer_config is not None,
    )
    _announce(plan)
    os.environ[BIND_VARIABLE] = os.environ[_OUR_BINDING] = plan.as_vllm_environment()
    os.environ[placement.PLAN_VARIABLE] = plan.to_json()
    if placement.is_server():
        placement.bind_process(plan.engine_cpus, "API server")


def bind_own_threads(vllm_config: "VllmConfig", local_rank: int, ranks: int) -> int | None:
    """Bind this process, which was not started on its CPUs: worker ``local_rank`` of ``ranks`` of this machine.

    Returns the number of threads that it is to have, None where threads are not bound. Raises ``BindingError`` on a
    user's value that cannot be.
    """
    if not envs.VLLM_ARM_BINDING:
        return None
    plan = plan_threads(ranks, transfers_kv_cache=vllm_config.kv_transfer_config is not None)
    if local_rank == 0:
        _announce(plan)
    if not plan.ranks:
        return None
    os.environ[placement.PLAN_VARIABLE] = plan.to_json()
    cpus = plan.ranks[local_rank].cpus
    name = f"worker {local_rank} of this machine"
    if placement.move_process(cpus, name):
        logger.info("%s: bound to CPUs %s", name, format_cpu_list(cpus))
    return len(cpus)


def _announce(plan: BindingPlan) -> None:
    for reason in plan.reasons:
        logger.info("thread binding: %s", reason)
    for warning in plan.warnings:
        warn_once_in_process_tree(f"thread binding: {warning}")


def _visible_nodes() -> list[int] | None:
    value = os.environ.get("CPU_VISIBLE_MEMORY_NODES")
    return [int(node) for node in value.split(",")] if value else None
