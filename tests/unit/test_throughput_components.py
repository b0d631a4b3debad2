# SPDX-License-Identifier: Apache-2.0
"""The profile of the throughput benchmark: which component an operation belongs to, and how time is shared out."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serving import components as c
from benchmarks.serving import report, timed_scheduler

FORWARD = "gpu_model_runner: forward"


def op(name: str, begin: float, end: float) -> c.Event:
    return c.Event(name, begin, end, False)


def scope(name: str, begin: float, end: float) -> c.Event:
    return c.Event(name, begin, end, True)


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("_C::onednn_mm", c.LINEAR_ONEDNN),
        ("_C::onednn_scaled_mm", c.LINEAR_ONEDNN),
        ("aten::linear", c.LINEAR_TORCH),
        ("aten::addmm", c.LINEAR_TORCH),
        ("aten::_dyn_quant_matmul_4bit", c.LINEAR_KLEIDIAI),
        ("_C::weight_packed_linear", c.LINEAR_VLLM),
        ("_C::cpu_gemm_wna16", c.LINEAR_VLLM),
        ("vllm_arm::linear_bf16", c.LINEAR_OURS),
        ("_C::cpu_attention_with_kv_cache", c.ATTENTION),
        ("_C::get_scheduler_metadata", c.ATTENTION),
        ("vllm_arm::paged_attention", c.ATTENTION),
        ("aten::scaled_dot_product_attention", c.ATTENTION),
        ("_C::cpu_attn_reshape_and_cache", c.CACHE_WRITE),
        ("vllm_arm::write_kv_cache", c.CACHE_WRITE),
        ("vllm_arm::schedule_attention", c.ATTENTION),
        ("_C_cache_ops::concat_and_cache_mla", c.CACHE_WRITE),
        ("vllm_arm::rms_norm", c.NORMS),
        ("vllm_arm::fused_add_rms_norm", c.NORMS),
        ("_C::silu_and_mul", c.NORMS),
        ("_C::rotary_embedding", c.NORMS),
        ("gpu_model_runner: sample", c.SAMPLING),
        ("c10d::allreduce_", c.COLLECTIVES),
        ("gloo:all_reduce", c.COLLECTIVES),
        ("_C::shm_allreduce", c.COLLECTIVES),
    ],
)
def test_operations_and_their_components(name: str, component: str) -> None:
    rule = c.find_rule(name, ())
    assert rule is not None
    assert rule.component == component


@pytest.mark.parametrize("name", ["aten::embedding", "aten::view", FORWARD, "execute_context_1(4)_generation_0(0)"])
def test_what_no_rule_names(name: str) -> None:
    assert c.find_rule(name, (FORWARD,)) is None


def test_elementwise_operations_are_norms_only_in_the_forward_pass() -> None:
    assert c.find_rule("aten::mul", ()) is None
    rule = c.find_rule("aten::mul", ("execute", FORWARD))
    assert rule is not None
    assert rule.component == c.NORMS


def test_time_is_shared_out_by_nesting() -> None:
    profile = c.classify(
        [
            scope(FORWARD, 0, 100),
            op("aten::linear", 10, 40),
            op("aten::addmm", 12, 38),  # within the linear: not counted twice
            op("vllm::unified_attention_with_output", 50, 80),
            op("_C::cpu_attn_reshape_and_cache", 55, 60),
            op("_C::cpu_attention_with_kv_cache", 60, 75),
            op("aten::embedding", 90, 95),
            scope("gpu_model_runner: sample", 200, 220),
            op("aten::argmax", 201, 219),
        ],
        scheduler_intervals=[(1_000_110_000, 1_000_140_000), (1_000_130_000, 1_000_150_000)],
        epoch_nanoseconds=1_000_000_000,
    )
    assert profile.window_seconds == pytest.approx(220e-6)
    expected = {
        c.LINEAR_TORCH: 30,
        c.ATTENTION: 10 + 15,
        c.CACHE_WRITE: 5,
        c.OTHER: 5,
        c.PYTHON: 100 - 65,
        c.SAMPLING: 20,
        c.SCHEDULER: 40,
        c.IDLE: 60,
    }
    assert {name: seconds * 1e6 for name, seconds in profile.seconds.items()} == pytest.approx(expected)
    assert profile.operations[0] == (FORWARD, c.PYTHON, pytest.approx(35e-6))


@st.composite
def trees(draw: st.DrawFn, begin: int = 0, end: int = 1000, depth: int = 3) -> list[c.Event]:
    """Events that nest, as those of a thread do."""
    names = ["aten::linear", "aten::view", "_C::cpu_attention_with_kv_cache", "vllm::unified_attention"]
    cuts = sorted(draw(st.lists(st.integers(begin, end), max_size=6)))
    events: list[c.Event] = []
    for left, right in zip(cuts[::2], cuts[1::2], strict=False):
        events.append(c.Event(draw(st.sampled_from(names)), left, right, draw(st.booleans())))
        if depth and right > left:
            events += draw(trees(left, right, depth - 1))
    return events


@given(trees(), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=5))
def test_the_components_make_up_the_window(events: list[c.Event], intervals: list[tuple[int, int]]) -> None:
    if not events:
        return
    ordered = [(min(pair), max(pair)) for pair in intervals]
    profile = c.classify(events, ordered)
    assert sum(profile.seconds.values()) == pytest.approx(profile.window_seconds)
    assert all(seconds > 0 for seconds in profile.seconds.values())


def test_a_trace_is_read_from_its_busiest_thread(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::linear", "ts": 1.5, "dur": 2, "tid": 7},
        {"ph": "X", "cat": "user_annotation", "name": FORWARD, "ts": 1, "dur": 4, "tid": 7},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 9, "tid": 8},
        {"ph": "X", "cat": "Trace", "name": "span", "ts": 0, "dur": 99, "tid": "Spans"},
        {"ph": "i", "name": "mark", "ts": 0, "tid": 7},
    ]
    path = tmp_path / "rank0.pt.trace.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": 42, "traceEvents": events}))
    found, epoch = c.read_trace(path)
    assert epoch == 42
    assert found == [op("aten::linear", 1.5, 3.5), scope(FORWARD, 1, 5)]
    path.write_text(json.dumps({"traceEvents": events[3:]}))
    with pytest.raises(ValueError, match="has no operations"):
        c.read_trace(path)


def test_the_mean_of_ranks() -> None:
    first = c.classify([op("aten::linear", 0, 10)])
    second = c.classify([op("aten::linear", 0, 10), op("aten::view", 20, 30)])
    mean = c.average([first, second])
    assert mean.window_seconds == pytest.approx(20e-6)
    assert mean.seconds[c.LINEAR_TORCH] == pytest.approx(10e-6)
    assert mean.seconds[c.IDLE] == pytest.approx(5e-6)
    assert sum(mean.shares().values()) == pytest.approx(100)


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    path = tmp_path / "components.png"
    report.plot_components(path, "title", {"stock": c.classify([op("aten::linear", 0, 10), op("aten::view", 20, 30)])})
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_scheduler_notes_when_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Scheduler:
        def __init__(self, vllm_config: "Config") -> None:
            self.vllm_config = vllm_config

        def schedule(self, number: int) -> int:
            return number + 1

        def update_from_output(self) -> None:
            raise RuntimeError("the scheduler's own")

    class Config:
        def __init__(self) -> None:
            self.scheduler_config = self
            self.scheduler_cls: object = "ours"

        def get_scheduler_cls(self) -> type[Scheduler]:
            assert self.scheduler_cls is None
            return Scheduler

    path = tmp_path / "intervals.txt"
    monkeypatch.setenv(timed_scheduler.INTERVALS_VARIABLE, str(path))
    scheduler = timed_scheduler.make_scheduler(vllm_config=Config())
    assert scheduler.schedule(1) == 2
    with pytest.raises(RuntimeError, match="the scheduler's own"):
        scheduler.update_from_output()
    intervals = timed_scheduler.read_intervals(path)
    assert len(intervals) == 2
    assert all(begin <= end for begin, end in intervals)
    assert timed_scheduler.read_intervals(tmp_path / "none") == []
