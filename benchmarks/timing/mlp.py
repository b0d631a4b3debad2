# SPDX-License-Identifier: Apache-2.0
"""One process of the allocator's case: ``python -P mlp.py THREADS PASSES``. Prints what a pass takes as JSON.

A gated MLP in bf16 as torch runs it, every tensor of each pass allocated anew. As where weights are mapped from a
file, nothing large is freed before: glibc raises its threshold for mmap by what is freed, and so hides its cost.
"""

import json
import resource
import sys
import time

import torch
from torch.nn.functional import linear

TOKENS, HIDDEN, INTERMEDIATE = 512, 1024, 2816
_WARM_UPS = 5


def random_tensor(rows: int, columns: int) -> torch.Tensor:
    """Made in bf16, without a larger one that would be freed."""
    return torch.empty(rows, columns, dtype=torch.bfloat16).normal_()


def main(threads: int, passes: int) -> None:
    """Time ``passes`` passes on ``threads`` threads."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    x = random_tensor(TOKENS, HIDDEN)
    gate, up = random_tensor(INTERMEDIATE, HIDDEN), random_tensor(INTERMEDIATE, HIDDEN)
    down = random_tensor(HIDDEN, INTERMEDIATE)

    def run() -> torch.Tensor:
        # The activation in fp32, rounded once.
        wide = linear(x, gate).float()
        return linear((wide * torch.sigmoid(wide) * linear(x, up).float()).to(torch.bfloat16), down)

    for _ in range(_WARM_UPS):
        run()
    before = resource.getrusage(resource.RUSAGE_SELF)
    seconds = []
    for _ in range(passes):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    after = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "seconds": seconds,
                "page_faults": (after.ru_minflt - before.ru_minflt) / passes,
                "system_seconds": (after.ru_stime - before.ru_stime) / passes,
                "user_seconds": (after.ru_utime - before.ru_utime) / passes,
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
