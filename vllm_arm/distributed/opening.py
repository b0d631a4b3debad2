# SPDX-License-Identifier: Apache-2.0
"""Chooses the transport of a group. Every rank of it takes the same one, and one rank says which and why."""

from collections.abc import Callable, Sequence

import torch.distributed as dist

from vllm_arm.distributed.host_watch import watch_hosts
from vllm_arm.distributed.hosts import HostLayout, host_identity, lay_out
from vllm_arm.distributed.messages import MessageTransport, SpanningTransport
from vllm_arm.distributed.transport import SharedMemory, Transport
from vllm_arm.logs import get_logger
from vllm_arm.ops import collectives
from vllm_arm.startup import warn_once_in_process_tree

logger = get_logger(__name__)

_APART = "each of its ranks is on a host of its own"

Exchange = Callable[[str], list[str]]
"""Gives every rank's text in rank order; a collective call."""


def open_transport(
    group: dist.ProcessGroup, ranks: Sequence[int], rank: int, name: str, own_address: Callable[[], str]
) -> Transport:
    """The fastest transport that ``group`` can have; a collective call of its members.

    ``ranks`` are their global ranks and ``rank`` is this one's in the group; ``name`` is the group's in the log.
    ``own_address`` gives what other hosts reach this one by.
    """
    world_size = len(ranks)

    def exchange(text: str) -> list[str]:
        texts = [""] * world_size
        dist.all_gather_object(texts, text, group=group)
        return texts

    layout = lay_out(exchange(host_identity()))
    if len(layout.hosts) > 1:
        problem = watch_hosts(exchange, layout, rank, name, own_address())
        if problem:
            warn_once_in_process_tree(f"hosts of group {name} are not watched, an idle one may be left: {problem}")
    local, reason = _open_on_hosts(exchange, layout, rank)
    transport: Transport
    if local is None:
        transport = MessageTransport(group, ranks, rank, "torch.distributed")
        message = f"collectives of group {name}, {world_size} ranks: torch.distributed's, because {reason}"
        if rank == 0 and reason == _APART:
            logger.info(message)
        elif rank == 0:
            warn_once_in_process_tree(message)
    elif len(layout.hosts) == 1:
        transport = local
    else:
        transport = SpanningTransport(group, ranks, rank, layout, local)
    if rank == 0 and local is not None:
        logger.info("collectives of group %s, %d ranks: %s", name, world_size, transport.description)
    return transport


def _open_on_hosts(exchange: Exchange, layout: HostLayout, rank: int) -> tuple[SharedMemory | None, str]:
    """This host's shared memory, or None and why some host has none; every rank comes to the same end."""
    if not layout.is_even:
        counts = ", ".join(str(len(ranks)) for ranks in layout.hosts)
        return None, f"its hosts have different numbers of ranks ({counts})"
    if max(len(ranks) for ranks in layout.hosts) == 1:
        return None, _APART
    if len(layout.hosts[0]) > collectives.MAXIMUM_WORLD_SIZE:
        return None, f"a host has more than {collectives.MAXIMUM_WORLD_SIZE} ranks"
    neighbours = layout.hosts[layout.host_of(rank)]
    local_rank = neighbours.index(rank)

    def exchange_locally(text: str) -> list[str]:
        # Over the whole group, since every host does this at once.
        texts = exchange(text)
        return [texts[neighbour] for neighbour in neighbours]

    handle, problem = None, ""
    try:
        handle = collectives.open_communicator(local_rank, len(neighbours), exchange_locally)
    except RuntimeError as error:
        problem = str(error)
    problems = [text for text in exchange(problem) if text]
    if problems or handle is None:
        if handle is not None:
            collectives.close(handle)
        return None, problems[0]
    return SharedMemory(local_rank, len(neighbours), handle), ""
