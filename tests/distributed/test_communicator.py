# SPDX-License-Identifier: Apache-2.0
"""The communicator of a group of processes, on one host and on several, against sums made in one process."""

import pytest

from tests.distributed import jobs
from tests.distributed.ranks import run_on_ranks

ONE_HOST = ["a", "a"]
THREE_RANKS = ["a", "a", "a"]
TWO_HOSTS = ["a", "a", "b", "b"]
INTERLEAVED = ["a", "b", "a", "b"]
APART = ["a", "b"]
UNEVEN = ["a", "a", "b"]
SHARED = "shared memory"
SPANNING = "shared memory on each of 2 hosts, gloo between them"
MESSAGES = "torch.distributed"
LAYOUTS = {
    "one-host": (ONE_HOST, SHARED),
    "three-ranks": (THREE_RANKS, SHARED),
    "two-hosts": (TWO_HOSTS, SPANNING),
    "interleaved": (INTERLEAVED, SPANNING),
    "apart": (APART, MESSAGES),
    "uneven": (UNEVEN, MESSAGES),
}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> tuple[list[str], str]:
    return request.param


def test_every_rank_takes_the_same_way(layout: tuple[list[str], str]) -> None:
    hosts, description = layout
    assert run_on_ranks(jobs.describe, hosts) == [(description, description == SHARED)] * len(hosts)


def test_sums_are_right_and_the_same_bits_everywhere(layout: tuple[list[str], str]) -> None:
    found = run_on_ranks(jobs.sums, layout[0])
    assert all(other == found[0] for other in found)


def test_gathers_put_the_ranks_in_order(layout: tuple[list[str], str]) -> None:
    run_on_ranks(jobs.gathers, layout[0])


def test_parts_of_several_lengths(layout: tuple[list[str], str]) -> None:
    run_on_ranks(jobs.uneven_parts, layout[0])


@pytest.mark.parametrize("hosts", [ONE_HOST, THREE_RANKS, TWO_HOSTS, APART])
def test_what_one_rank_sends_another_receives(hosts: list[str]) -> None:
    run_on_ranks(jobs.point_to_point, hosts)


@pytest.mark.parametrize("hosts", [ONE_HOST, TWO_HOSTS, APART])
def test_a_compiled_layer_gives_what_it_gives_eagerly(hosts: list[str]) -> None:
    run_on_ranks(jobs.compiled, hosts)


def test_a_mistake_is_named_before_any_rank_waits() -> None:
    assert run_on_ranks(jobs.mistakes, ONE_HOST)[0] == [
        "all_gatherv: dim=1: expected 0",
        "all_gatherv: 1 sizes: expected one for each of 2 ranks",
        "all_gatherv: input of 5 rows: expected 4 by sizes [4, 4]",
        "reduce_scatterv: input of 5 rows: expected 8 by sizes [4, 4]",
        "reduce_scatter: 5 rows: expected a multiple of 2 ranks",
    ]


def test_vllms_queues_know_the_ranks_of_a_host() -> None:
    assert run_on_ranks(jobs.queue_readers, TWO_HOSTS) == [1, 1, 0, 0]
