# SPDX-License-Identifier: Apache-2.0
"""The tables and plots of the throughput benchmark."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.serving.components import COMPONENTS, Profile
from benchmarks.serving.summary import StepSummary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT_REQUIREMENTS = "requirements/bench.txt"
_RISE, _FALL, _TOTAL = "#4c9f70", "#c8553d", "#3d5a80"
_SHOWN_SHARE = 3.0


def format_bytes(count: float) -> str:
    """``count`` bytes in GiB."""
    return f"{count / 2**30:.2f} GiB"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def throughput_table(title: str, summaries: Sequence[StepSummary], titles: dict[str, str]) -> Table:
    """One row a step; ``titles`` are those of the steps."""
    table = Table(title=title, title_justify="left")
    for name in (
        *("step", "tokens/s", "±", "generated/s", "requests/s", "over the last", "over the start"),
        *("page faults", "CPU s", "system s", "peak memory"),
    ):
        table.add_column(name, justify="left" if name == "step" else "right", overflow="fold")
    for summary in summaries:
        speed = summary.tokens_per_second
        if speed is None:
            table.add_row(titles[summary.step], f"[red]{summary.error}")
            continue
        table.add_row(
            titles[summary.step],
            f"{speed.median:.1f}",
            f"{speed.percent:.1f} %" if summary.rounds > 1 else "",
            f"{summary.output_tokens_per_second:.1f}",
            f"{summary.requests_per_second:.2f}",
            _ratio(summary.over_previous),
            _ratio(summary.over_start),
            f"{summary.page_faults:,.0f}",
            f"{summary.cpu_seconds:.2f}",
            f"{summary.system_seconds:.2f}",
            format_bytes(summary.peak_bytes or 0),
        )
    return table


def profile_table(profiles: dict[str, Profile]) -> Table:
    """Per cent of the worker's time by component, a column for each step."""
    table = Table(title="share of the worker's time, eager mode, under the profiler", title_justify="left")
    table.add_column("component")
    for name in profiles:
        table.add_column(name, justify="right")
    shares = {name: profile.shares() for name, profile in profiles.items()}
    for component in COMPONENTS:
        if any(component in share for share in shares.values()):
            table.add_row(component, *(f"{share.get(component, 0.0):.1f} %" for share in shares.values()))
    table.add_row("seconds", *(f"{profile.window_seconds:.2f}" for profile in profiles.values()), end_section=True)
    return table


def operations_table(name: str, profile: Profile, count: int = 12) -> Table:
    """The ``count`` operations that took longest."""
    table = Table(title=f"longest operations, {name}", title_justify="left")
    for column in ("operation", "component", "share"):
        table.add_column(column, justify="right" if column == "share" else "left")
    for operation, component, seconds in profile.operations[:count]:
        table.add_row(operation, component, f"{100 * seconds / profile.window_seconds:.1f} %")
    return table


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plot_waterfall(path: Path, title: str, host: str, summaries: Sequence[StepSummary], titles: dict[str, str]) -> None:
    """Tokens per second from the first step to the last: what each added to the one before it."""
    done = [(titles[each.step], each.tokens_per_second) for each in summaries if each.tokens_per_second is not None]
    if not done:
        raise ValueError("nothing to plot: no run succeeded")
    figure = _figure(2 + 1.5 * (len(done) + 1), 5)
    axes = figure.subplots()
    previous = 0.0
    for position, (_, speed) in enumerate(done):
        value = speed.median
        colour = _TOTAL if position == 0 else _RISE if value >= previous else _FALL
        axes.bar(position, value - previous, bottom=previous, color=colour, width=0.7)
        axes.errorbar(
            position, value, yerr=[[value - speed.least], [speed.most - value]], color="black", capsize=4, lw=1
        )
        label = f"{value:.0f}" if position == 0 else f"{value:.0f}\n{value / previous:.2f}x"
        axes.annotate(label, (position, max(speed.most, previous)), (0, 6), textcoords="offset points", ha="center")
        if position:
            axes.plot([position - 1.35, position + 0.35], [previous, previous], color="grey", lw=0.8)
        previous = value
    axes.bar(len(done), previous, color=_TOTAL, width=0.7)
    total = f"{previous:.0f}\n{previous / done[0][1].median:.2f}x"
    axes.annotate(total, (len(done), previous), (0, 6), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(done) + 1), [name.replace(", ", ",\n") for name, _ in done] + ["all"])
    axes.set_ylim(0, 1.2 * max(speed.most for _, speed in done))
    axes.set_ylabel("tokens/s, prompt and generated")
    axes.set_title(f"{title}\n{host}", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def plot_components(path: Path, title: str, profiles: dict[str, Profile]) -> None:
    """A stacked bar for each step: per cent of the worker's time by component."""
    from matplotlib import colormaps

    figure = _figure(9, 1.6 + 0.9 * len(profiles))
    axes = figure.subplots()
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined, unused-ignore]
    left = dict.fromkeys(profiles, 0.0)
    for number, component in enumerate(COMPONENTS):
        shares = {name: profile.shares().get(component, 0.0) for name, profile in profiles.items()}
        if not any(shares.values()):
            continue
        axes.barh(
            list(profiles), list(shares.values()), left=list(left.values()), color=colours[number], label=component
        )
        for row, (name, share) in enumerate(shares.items()):
            if share >= _SHOWN_SHARE:
                axes.annotate(f"{share:.0f}", (left[name] + share / 2, row), ha="center", va="center", fontsize=8)
            left[name] += share
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the worker's time")
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
