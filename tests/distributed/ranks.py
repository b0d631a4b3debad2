# SPDX-License-Identifier: Apache-2.0
"""Runs a function on every rank of a group, each in a process of its own."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

_SECONDS = 90
_CONTEXT = multiprocessing.get_context("forkserver")
# Imported once, not by each rank.
_CONTEXT.set_forkserver_preload(["vllm.config", "vllm_arm.distributed.communicator"])

Job = Callable[[dist.ProcessGroup], object]


def _run(job: Job, rank: int, hosts: Sequence[str], store: Path, results: Connection) -> None:
    from vllm_arm.distributed import opening

    try:
        torch.set_num_threads(1)
        opening.host_identity = lambda: hosts[rank]
        os.environ["VLLM_HOST_IP"] = "127.0.0.1"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(hosts))
        group = dist.new_group(list(range(len(hosts))), backend="gloo")
        results.send((True, job(group)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.send((False, traceback.format_exc()))
        raise SystemExit(1) from None


def run_on_ranks(job: Job, hosts: Sequence[str]) -> list[object]:
    """What ``job(group)`` returns on each rank; rank ``i`` takes itself to be on host ``hosts[i]``.

    Raises ``AssertionError`` with the first traceback where a rank fails, or takes longer than a minute and a half.
    """
    found: list[object] = []
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(len(hosts)):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_run, args=(job, rank, hosts, Path(folder, "store"), sender))
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(_SECONDS), f"rank {rank} did not answer within {_SECONDS} s"
                passed, value = pipe.recv()
                assert passed, f"rank {rank}: {value}"
                found.append(value)
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
                    process.join()
    return found
