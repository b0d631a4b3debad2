# SPDX-License-Identifier: Apache-2.0
"""One measured process: ``python -P worker.py SPEC`` runs an offline workload through vLLM and writes what it took.

A script of its own, outside the package, so that the process holds nothing but vLLM. ``SPEC`` is a JSON file, see
:func:`benchmarks.serving.child.write_specification`. Lines on stdout that begin with ``PROGRESS`` say how far it is.
"""

import functools
import io
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

PROGRESS = "throughput-progress:"
_SHOWN_EVERY_SECONDS = 0.5


def announce(phase: str, done: int = 0, total: int = 0) -> None:
    """Tell the parent the phase, and how many of its requests are done."""
    print(PROGRESS, json.dumps({"phase": phase, "done": done, "total": total}), flush=True)


class RequestsDone(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
    """What vLLM takes for its bar: announces the requests that have finished."""

    def __init__(self, *arguments: Any, phase: str, **options: Any) -> None:
        self.phase = phase
        super().__init__(*arguments, **{**options, "file": io.StringIO(), "mininterval": _SHOWN_EVERY_SECONDS})

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Announce in place of drawing."""
        announce(self.phase, self.n, self.total or 0)


def processes(title: str) -> list[psutil.Process]:
    """The descendants of this process whose title holds ``title``."""
    return [child for child in psutil.Process().children(recursive=True) if title in " ".join(child.cmdline())]


def usage(process: psutil.Process) -> dict[str, float]:
    """Minor page faults, user and system seconds of ``process`` so far: proc(5), fields 10, 14 and 15 of stat."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return {
        "page_faults": int(fields[7]),
        "user_seconds": int(fields[11]) / ticks,
        "system_seconds": int(fields[12]) / ticks,
    }


def total_usage(found: list[psutil.Process]) -> dict[str, float]:
    """The sums of :func:`usage`."""
    usages = [usage(process) for process in found]
    return {name: sum(each[name] for each in usages) for name in usages[0]}


def peak_bytes(process: psutil.Process) -> int:
    """The most memory that ``process`` had resident: VmHWM of proc(5)."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def make_prompts(spec: dict[str, Any], llm: Any) -> tuple[list[Any], list[int]]:
    """The prompts of the workload and how many tokens each is to generate."""
    if spec["requests"] is not None:
        prompts = [
            {"prompt_token_ids": request["prompt_token_ids"]} if "prompt_token_ids" in request else request["prompt"]
            for request in spec["requests"]
        ]
        return prompts, [request["output_len"] for request in spec["requests"]]
    model_config = llm.llm_engine.model_config
    special = set() if model_config.skip_tokenizer_init else set(llm.get_tokenizer().all_special_ids)
    ordinary = [token for token in range(model_config.get_vocab_size()) if token not in special]
    numbers = random.Random(spec["seed"])
    prompts = [{"prompt_token_ids": numbers.choices(ordinary, k=spec["input_len"])} for _ in range(spec["num_prompts"])]
    return prompts, [spec["output_len"]] * len(prompts)


def engine_arguments(spec: dict[str, Any]) -> Any:
    """The ``EngineArgs`` of the workload; prints vLLM's usage and exits on an argument that it does not know."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(spec["engine_arguments"]))


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Load the model, run the warm-up passes, then the measured pass; return the figures."""
    announce("loading the model")
    started = time.monotonic()
    from vllm import LLM, SamplingParams

    llm = LLM.from_engine_args(engine_arguments(spec))
    startup_seconds = time.monotonic() - started
    prompts, output_lengths = make_prompts(spec, llm)
    sampling = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length, detokenize=False)
        for length in output_lengths
    ]

    def run(phase: str) -> Any:
        return llm.generate(prompts, sampling, use_tqdm=functools.partial(RequestsDone, phase=phase))

    for number in range(spec["warmups"]):
        run(f"warm-up {number + 1} of {spec['warmups']}")
    # Each rank has a process of its own, or is EngineCore where there is only one and it is not separate.
    workers = processes("Worker") or processes("EngineCore")
    engines = processes("EngineCore")
    if spec["profile"]:
        llm.start_profile()
    before = total_usage(workers)
    started = time.perf_counter()
    outputs = run("profile" if spec["profile"] else "measure")
    seconds = time.perf_counter() - started
    after = total_usage(workers)
    if spec["profile"]:
        announce("writing the profile")
        llm.stop_profile()
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "seconds": seconds,
        "startup_seconds": startup_seconds,
        "requests": len(outputs),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "worker_page_faults": after["page_faults"] - before["page_faults"],
        "worker_user_seconds": after["user_seconds"] - before["user_seconds"],
        "worker_system_seconds": after["system_seconds"] - before["system_seconds"],
        "worker_peak_bytes": sum(peak_bytes(process) for process in workers),
        "engine_peak_bytes": sum(peak_bytes(process) for process in engines if process not in workers),
    }


def main() -> None:
    """Run the specification that the command line names."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    if spec["import_path"]:
        # Inherited by the processes that vLLM spawns: EngineCore imports the timed scheduler.
        sys.path.append(spec["import_path"])
    result = measure(spec)
    Path(spec["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
