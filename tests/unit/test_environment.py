# SPDX-License-Identifier: Apache-2.0
"""What EngineCore and the workers inherit."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_arm.runtime import allocator, environment, openmp, placement
from vllm_arm.runtime.binding import BIND_VARIABLE, BindingError
from vllm_arm.runtime.choice import Choice
from vllm_arm.runtime.topology import LogicalCpu, NumaNode, Topology

MIMALLOC = "/site/lib/libmimalloc.so.3.4"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment of its own for each test: what a test sets in os.environ is gone after it."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "_VLLM", "MIMALLOC", "LD_"))
    }
    monkeypatch.setattr(os, "environ", kept)
    kept["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    monkeypatch.setattr(allocator, "find_mimalloc", lambda: MIMALLOC)
    logging.getLogger("vllm").propagate = True


@pytest.fixture
def torch_directory(tmp_path: Path) -> Path:
    library = tmp_path / "site/torch/lib/libgomp.so.1"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\0GOMP_1.0\0")
    return tmp_path / "site/torch"


def configuration(world: int = 1, **settings: object) -> SimpleNamespace:
    defaults = {
        "data_parallel_size": 1,
        "data_parallel_size_local": 1,
        "data_parallel_rank_local": None,
        "use_ray": False,
    }
    parallel_config = SimpleNamespace(local_world_size=world, **{**defaults, **settings})
    return SimpleNamespace(parallel_config=parallel_config, kv_transfer_config=None)


def test_mimalloc_comes_first_and_is_tuned(torch_directory: Path) -> None:
    os.environ["LD_PRELOAD"] = "/opt/libprofiler.so"
    environment.preload_libraries(torch_directory)
    assert os.environ["LD_PRELOAD"].split(":") == [MIMALLOC, "/opt/libprofiler.so"]
    assert {name: os.environ[name] for name in allocator.TUNING} == allocator.TUNING


def test_a_second_call_changes_nothing_and_says_nothing(
    torch_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment.preload_libraries(torch_directory)
    settled = dict(os.environ)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        environment.preload_libraries(torch_directory)
    assert dict(os.environ) == settled
    assert not caplog.records


def test_the_users_tuning_is_left_alone(torch_directory: Path) -> None:
    os.environ["MIMALLOC_PURGE_DELAY"] = "100"
    environment.preload_libraries(torch_directory)
    assert os.environ["MIMALLOC_PURGE_DELAY"] == "100"


def test_a_missing_library_is_one_warning(
    torch_directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator, "find_mimalloc", lambda: None)
    for _ in range(2):
        environment.preload_libraries(torch_directory)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "allocator: mimalloc is not installed (pip install cmeel-mimalloc): glibc's malloc is used"
    ]
    assert "LD_PRELOAD" not in os.environ


def test_copies_of_the_openmp_runtime_become_one(torch_directory: Path) -> None:
    copy = torch_directory.parent / "sentencepiece.libs/libgomp-6a29.so.1.0.0"
    copy.parent.mkdir()
    copy.write_bytes(b"\0GOMP_1.0\0")
    os.environ["LD_LIBRARY_PATH"] = "/opt/lib"
    environment.preload_libraries(torch_directory)
    runtime = str(torch_directory / "lib/libgomp.so.1")
    assert os.environ["LD_PRELOAD"].split(":") == [MIMALLOC, runtime, copy.name]
    folder, rest = os.environ["LD_LIBRARY_PATH"].split(":")
    assert rest == "/opt/lib"
    assert (Path(folder) / copy.name).resolve() == Path(runtime)


def test_another_kind_of_runtime_of_the_user_is_not_joined_by_libgomp(torch_directory: Path) -> None:
    copy = torch_directory.parent / "x.libs/libgomp-1.so"
    copy.parent.mkdir()
    copy.write_bytes(b"")
    os.environ["LD_PRELOAD"] = "/opt/libiomp5.so"
    environment.preload_libraries(torch_directory)
    assert "libgomp" not in os.environ["LD_PRELOAD"]


def test_the_engine_in_this_process_is_warned_about(torch_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    environment.preload_libraries(torch_directory)
    assert f"start it with LD_PRELOAD={MIMALLOC}" in caplog.text


def test_the_allocator_that_vllm_bundles_is_dropped(tmp_path: Path) -> None:
    bundled = f"{tmp_path}/libs/libtcmalloc_minimal.so.4"
    os.environ["LD_PRELOAD"] = f"{bundled}:{MIMALLOC}:/x/libgomp.so.1"
    environment.drop_bundled_allocator(tmp_path)
    assert os.environ["LD_PRELOAD"] == f"{MIMALLOC}:/x/libgomp.so.1"
    os.environ["LD_PRELOAD"] = bundled
    environment.drop_bundled_allocator(tmp_path)
    assert os.environ["LD_PRELOAD"] == bundled, "without mimalloc it stays"


def test_threads_are_bound_once_and_engine_core_keeps_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    environment.bind_threads(configuration())
    bound = os.environ[BIND_VARIABLE]
    assert bound
    assert environment.explicit_binding() is None, "our own value is not the user's"
    environment.bind_threads(configuration())
    assert os.environ[BIND_VARIABLE] == bound


def test_children_get_the_plan_and_only_a_server_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[int, ...]] = []
    monkeypatch.setattr(placement, "bind_process", lambda cpus, name: bound.append(cpus))
    monkeypatch.setattr(placement, "is_server", lambda: False)
    environment.bind_threads(configuration())
    plan = placement.inherited_plan()
    assert plan is not None
    assert plan.as_vllm_environment() == os.environ[BIND_VARIABLE]
    assert not bound
    for name in (BIND_VARIABLE, "_VLLM_ARM_BINDING"):
        del os.environ[name]
    monkeypatch.setattr(placement, "is_server", lambda: True)
    environment.bind_threads(configuration())
    assert bound == [plan.engine_cpus]


def test_an_explicit_binding_wins() -> None:
    cpu = min(os.sched_getaffinity(0))
    os.environ[BIND_VARIABLE] = f"{cpu}"
    environment.bind_threads(configuration())
    assert os.environ[BIND_VARIABLE] == f"{cpu}"


def test_an_impossible_binding_is_an_error_that_names_the_variable() -> None:
    os.environ[BIND_VARIABLE] = "0-99999"
    with pytest.raises(BindingError, match=BIND_VARIABLE):
        environment.bind_threads(configuration())


@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        ({"VLLM_ARM_BINDING": "0"}, {}),
        ({"VLLM_CPU_SIM_MULTI_NUMA": "1"}, {}),
        ({}, {"data_parallel_size": 2, "data_parallel_rank_local": 1}),
        ({}, {"use_ray": True}),
    ],
)
def test_binding_is_left_to_vllm(variables: dict[str, str], settings: dict[str, object]) -> None:
    os.environ.update(variables)
    environment.bind_threads(configuration(**settings))
    assert BIND_VARIABLE not in os.environ


def test_a_worker_that_nobody_bound_binds_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[int, ...]] = []
    monkeypatch.setattr(placement, "move_process", lambda cpus, name: bound.append(cpus))
    cpu = min(os.sched_getaffinity(0))
    os.environ[BIND_VARIABLE] = f"{cpu}"
    assert environment.bind_own_threads(configuration(), 0, 1) == 1
    assert bound == [(cpu,)]
    inherited = placement.inherited_rank(0)
    assert inherited is not None
    assert inherited[1].cpus == (cpu,)
    for name, value in ((BIND_VARIABLE, "nobind"), ("VLLM_ARM_BINDING", "0")):
        os.environ[name] = value
        assert environment.bind_own_threads(configuration(), 0, 1) is None
    assert len(bound) == 1


def test_the_chosen_runtime_is_preloaded(torch_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "choose", lambda *_: Choice("/usr/lib/libgomp.so.1", "it has LSE atomics"))
    environment.preload_libraries(torch_directory)
    assert os.environ["LD_PRELOAD"].split(":") == [MIMALLOC, "/usr/lib/libgomp.so.1"]


def test_a_connector_gets_a_cpu_for_each_rank() -> None:
    cpus = tuple(LogicalCpu(cpu, cpu, 0, 0) for cpu in range(16))
    node = NumaNode(0, tuple(range(16)), 1 << 34, (10,))
    topology = Topology(cpus, (node,), frozenset(range(16)), frozenset({0}))
    without = environment.plan_threads(2, topology=topology)
    with_connector = environment.plan_threads(2, transfers_kv_cache=True, topology=topology)
    assert [len(rank.cpus) for rank in without.ranks] == [7, 7]
    assert [len(rank.cpus) for rank in with_connector.ranks] == [6, 6]
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    assert [len(rank.cpus) for rank in environment.plan_threads(2, topology=topology).ranks] == [8, 8]
