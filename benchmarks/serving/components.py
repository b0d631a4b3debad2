# SPDX-License-Identifier: Apache-2.0
"""Where a worker's time goes: classifies the operations of a trace of torch's profiler.

An operation that the table names takes all the time within it; otherwise what is within it is looked at in turn.
"""

import gzip
import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

LINEAR_ONEDNN = "linear: vLLM's oneDNN"
LINEAR_TORCH = "linear: torch"
LINEAR_VLLM = "linear: vLLM's kernels"
LINEAR_KLEIDIAI = "linear: KleidiAI int4"
LINEAR_OURS = "linear: vllm-arm"
ATTENTION = "attention"
CACHE_WRITE = "cache write"
NORMS = "norms and activations"
SAMPLING = "sampling"
COLLECTIVES = "collectives"
OTHER = "other operations"
PYTHON = "Python between operations"
SCHEDULER = "scheduler"
IDLE = "idle"

COMPONENTS = (
    LINEAR_ONEDNN,
    LINEAR_TORCH,
    LINEAR_VLLM,
    LINEAR_KLEIDIAI,
    LINEAR_OURS,
    ATTENTION,
    CACHE_WRITE,
    NORMS,
    SAMPLING,
    COLLECTIVES,
    OTHER,
    PYTHON,
    SCHEDULER,
    IDLE,
)
"""In the order in which they are shown."""

_FORWARD = "gpu_model_runner: forward"


class Rule(NamedTuple):
    """Operations whose name matches ``pattern`` as a whole belong to ``component``.

    ``looks_within``: only for what no rule names among the operations within it. ``only_in``: only within the
    annotation of that name.
    """

    pattern: str
    component: str
    looks_within: bool = False
    only_in: str | None = None


RULES = (
    Rule(r"gpu_model_runner: (sample|draft|bookkeep)", SAMPLING),
    Rule(r"_C\w*::(greedy_argmax|.*sampl.*)", SAMPLING),
    Rule(r"(c10d|_c10d_functional|gloo)::.*|gloo:.*", COLLECTIVES),
    Rule(r"_C\w*::shm_(all|send|recv|gather)\w*|vllm_arm::(all|reduce)_\w+", COLLECTIVES),
    Rule(r"vllm::(all_reduce|all_gather|reduce_scatter)\w*", COLLECTIVES, looks_within=True),
    Rule(r"vllm_arm::write_kv_cache", CACHE_WRITE),
    Rule(r"_C\w*::(\w*reshape_and_cache\w*|concat_and_cache\w*)", CACHE_WRITE),
    Rule(r"vllm::unified_(mla_)?kv_cache_update", CACHE_WRITE, looks_within=True),
    Rule(r"vllm_arm::\w*attention\w*", ATTENTION),
    Rule(r"_C\w*::(\w*attention\w*|mla_decode\w*|get_scheduler_metadata)|aten::_?scaled_dot_product\w*", ATTENTION),
    Rule(r"vllm::unified_(mla_)?attention\w*", ATTENTION, looks_within=True),
    Rule(r"vllm_arm::\w*(linear|gemm|matmul|experts)\w*", LINEAR_OURS),
    Rule(r"_C\w*::onednn_\w+", LINEAR_ONEDNN),
    Rule(r"aten::_dyn_quant_matmul_4bit|aten::_dyn_quant_pack_4bit_weight", LINEAR_KLEIDIAI),
    Rule(r"_C\w*::(\w*packed_linear|\w*scaled_mm\w*|\w*gemm\w*|\w*fused_(moe|experts)\w*)", LINEAR_VLLM),
    Rule(r"vllm::\w*(moe|fused_experts)\w*", LINEAR_VLLM, looks_within=True),
    Rule(r"aten::(linear|mm|addmm|matmul|bmm|_int_mm)|mkldnn::_?linear\w*", LINEAR_TORCH),
    Rule(r"(_C\w*|vllm_arm|vllm_ir)::\w*(norm|silu|gelu|swiglu|rotary|rope|quant)\w*", NORMS),
    # Without a kernel of its own, a norm or activation is a row of elementwise operations.
    Rule(
        r"aten::(pow|mean|rsqrt|mul|add|sub|div|silu|gelu|sigmoid|tanh|relu|softmax|to|copy_|cat|chunk|split\w*)_?",
        NORMS,
        only_in=_FORWARD,
    ),
)

_MATCHERS = [(re.compile(rule.pattern), rule) for rule in RULES]


class Event(NamedTuple):
    """An operation or annotation of the trace; begin and end in microseconds of the trace's own clock."""

    name: str
    begin: float
    end: float
    is_annotation: bool


class Profile(NamedTuple):
    """``seconds`` of each component of :data:`COMPONENTS` in a window of ``window_seconds``.

    ``operations`` are the seconds and the component of each operation, the longest first.
    """

    window_seconds: float
    seconds: dict[str, float]
    operations: list[tuple[str, str, float]]

    def shares(self) -> dict[str, float]:
        """Per cent of the window for each component."""
        return {name: 100 * value / self.window_seconds for name, value in self.seconds.items()}


def find_rule(name: str, scopes: Sequence[str]) -> Rule | None:
    """The first rule for an operation called ``name`` within the annotations ``scopes``."""
    for matcher, rule in _MATCHERS:
        if matcher.fullmatch(name) and (rule.only_in is None or rule.only_in in scopes):
            return rule
    return None


def read_trace(path: Path) -> tuple[list[Event], int]:
    """The events of the worker's busiest thread, and the trace's epoch in nanoseconds.

    Raises ``ValueError`` on a trace without operations.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as file:
        trace = json.load(file)
    kept = [
        event
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation")
    ]
    if not kept:
        raise ValueError(f"{path}: the trace has no operations")
    thread = Counter(event["tid"] for event in kept).most_common(1)[0][0]
    return [_event(event) for event in kept if event["tid"] == thread], int(trace.get("baseTimeNanoseconds", 0))


def _event(event: dict[str, Any]) -> Event:
    begin = float(event["ts"])
    return Event(event["name"], begin, begin + float(event.get("dur", 0)), event["cat"] == "user_annotation")


def classify(
    events: Iterable[Event], scheduler_intervals: Sequence[tuple[int, int]] = (), epoch_nanoseconds: int = 0
) -> Profile:
    """Share the time between the first event's begin and the last one's end out among the components.

    While no event runs, the worker waits: for the scheduler, where that is at work (``scheduler_intervals``, in
    nanoseconds since the epoch), otherwise it is idle.
    """
    ordered = sorted(events, key=lambda event: (event.begin, -event.end))
    if not ordered:
        raise ValueError("no events to classify")
    tally = _Tally()
    busy = _merge((event.begin, event.end) for event in ordered)
    _share(ordered, tally)
    scheduling = _merge(
        ((begin - epoch_nanoseconds) / 1e3, (end - epoch_nanoseconds) / 1e3) for begin, end in scheduler_intervals
    )
    for (_, begin), (end, _) in pairwise(busy):
        waited = _overlap(begin, end, scheduling)
        tally.seconds[SCHEDULER] += waited / 1e6
        tally.seconds[IDLE] += (end - begin - waited) / 1e6
    return tally.profile((busy[-1][1] - busy[0][0]) / 1e6)


class _Tally:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.operations: dict[tuple[str, str], float] = defaultdict(float)

    def add(self, event: Event, component: str, microseconds: float) -> None:
        seconds = microseconds / 1e6
        self.seconds[component] += seconds
        self.operations[event.name, component] += seconds

    def profile(self, window_seconds: float, count: int = 1) -> Profile:
        """The tally of ``count`` ranks as the mean of one."""
        ordered = sorted(self.operations.items(), key=lambda item: -item[1])
        return Profile(
            window_seconds,
            {name: self.seconds[name] / count for name in COMPONENTS if self.seconds[name] > 0},
            [(name, component, seconds / count) for (name, component), seconds in ordered],
        )


class _Open:
    """An event whose time is being shared out: ``within`` is what events inside it have taken already."""

    def __init__(self, event: Event, scopes: tuple[str, ...], default: str) -> None:
        self.event = event
        self.scopes = scopes
        self.default = default
        self.within = 0.0


def _share(ordered: list[Event], tally: _Tally) -> None:
    """Walk the events as the tree that their times make."""
    stack: list[_Open] = []
    closed_until = float("-inf")

    def close(until: float) -> None:
        while stack and stack[-1].event.end <= until:
            done = stack.pop()
            tally.add(done.event, done.default, done.event.end - done.event.begin - done.within)

    for event in ordered:
        if event.begin < closed_until:
            continue  # within one that a rule has taken whole
        close(event.begin)
        scopes = stack[-1].scopes if stack else ()
        rule = find_rule(event.name, scopes)
        duration = event.end - event.begin
        if stack:
            stack[-1].within += duration
        if rule is not None and not rule.looks_within:
            tally.add(event, rule.component, duration)
            closed_until = event.end
            continue
        default = rule.component if rule else PYTHON if event.is_annotation else OTHER
        stack.append(_Open(event, (*scopes, event.name) if event.is_annotation else scopes, default))
    close(float("inf"))


def _merge(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _overlap(begin: float, end: float, merged: list[tuple[float, float]]) -> float:
    """How much of begin..end the disjoint, ordered intervals ``merged`` cover."""
    covered = 0.0
    for other_begin, other_end in merged[max(0, bisect_right(merged, (begin, begin)) - 1) :]:
        if other_begin >= end:
            break
        covered += max(0.0, min(end, other_end) - max(begin, other_begin))
    return covered


def average(profiles: Sequence[Profile]) -> Profile:
    """The mean of the ranks' profiles."""
    tally = _Tally()
    for profile in profiles:
        for name, seconds in profile.seconds.items():
            tally.seconds[name] += seconds
        for name, component, seconds in profile.operations:
            tally.operations[name, component] += seconds
    window = sum(profile.window_seconds for profile in profiles) / len(profiles)
    return tally.profile(window, len(profiles))
