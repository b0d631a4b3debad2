# SPDX-License-Identifier: Apache-2.0
"""What the throughput benchmark runs: a model and its requests."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

SEED = 0


@dataclass(frozen=True)
class Workload:
    """An offline workload; ``dataset`` replaces ``input_len`` prompts of random tokens.

    ``requests`` are the rows of the dataset that are used. ``engine_arguments`` are those of ``vllm serve`` and come
    after ours, so that they win.
    """

    model: str
    input_len: int
    output_len: int
    num_prompts: int
    tensor_parallel_size: int = 1
    warmups: int = 1
    engine_arguments: tuple[str, ...] = ()
    dataset: str | None = None
    requests: tuple[dict[str, Any], ...] | None = field(default=None, repr=False)

    def arguments(self) -> list[str]:
        """The arguments of vLLM's engine. Without prefix caching, or the warm-up would answer for the measured pass."""
        return [
            *("--model", self.model, "--tensor-parallel-size", str(self.tensor_parallel_size)),
            "--no-enable-prefix-caching",
            *self.engine_arguments,
        ]

    def with_arguments(self, arguments: tuple[str, ...]) -> "Workload":
        """The same with more arguments of ``vllm serve``."""
        return replace(self, engine_arguments=(*self.engine_arguments, *arguments))

    def describe(self) -> dict[str, Any]:
        """What identifies the workload: as JSON, with a digest in place of the requests."""
        description = asdict(self)
        requests = description.pop("requests")
        description["engine_arguments"] = list(self.engine_arguments)
        description["dataset_sha256"] = _digest(requests) if requests is not None else None
        return description

    def title(self) -> str:
        """One line for a table."""
        if self.requests is None:
            lengths = f"{self.num_prompts} prompts of {self.input_len} tokens, {self.output_len} generated for each"
        else:
            lengths = f"{self.num_prompts} prompts of {self.dataset}"
        ranks = f", {self.tensor_parallel_size} ranks" if self.tensor_parallel_size > 1 else ""
        return f"{Path(self.model).name}: {lengths}{ranks}"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def resolve_model(model: str) -> str:
    """``model`` as an absolute path where it is a folder, as it is where it is a name of the hub.

    Raises ``ValueError`` on a folder without ``config.json`` and on a path that does not exist.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"--model: no model at {model}: expected a folder with config.json")
        return str(path.resolve())
    if model.startswith((".", "/", "~")):
        raise ValueError(f"--model: no folder {model}")
    return model


def is_quantised(model: str, engine_arguments: tuple[str, ...]) -> bool:
    """Whether the weights of ``model``, where it is a folder, or by ``engine_arguments``, are quantised already."""
    if any(argument.split("=")[0] in ("--quantization", "-q") for argument in engine_arguments):
        return True
    config = Path(model) / "config.json"
    return config.is_file() and any(
        name in json.loads(config.read_text()) for name in ("quantization_config", "compression_config")
    )


def read_dataset(path: Path, num_prompts: int | None, output_len: int) -> tuple[dict[str, Any], ...]:
    """The first ``num_prompts`` rows of a JSON Lines file (None: all).

    Each row has ``prompt`` (text) or ``prompt_token_ids`` (a list of ids), and may have ``output_tokens``; without it
    ``output_len`` tokens are generated. Raises ``ValueError`` naming the line that is not so.
    """
    requests: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(requests) == num_prompts:
                break
            if line.strip():
                requests.append(_parse_row(line, f"--dataset: {path}, line {number}", output_len))
    if not requests:
        raise ValueError(f"--dataset: {path} has no rows")
    if num_prompts is not None and len(requests) < num_prompts:
        raise ValueError(f"--num-prompts: {path} has only {len(requests)} rows, expected at least {num_prompts}")
    return tuple(requests)


def _parse_row(line: str, where: str, output_len: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object, got {type(row).__name__}")
    length = row.get("output_tokens", output_len)
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"{where}: output_tokens: expected a positive integer, got {length!r}")
    tokens = row.get("prompt_token_ids")
    if isinstance(tokens, list) and tokens and all(isinstance(token, int) for token in tokens):
        return {"prompt_token_ids": tokens, "output_len": length}
    if isinstance(row.get("prompt"), str) and row["prompt"]:
        return {"prompt": row["prompt"], "output_len": length}
    raise ValueError(f"{where}: expected 'prompt' (text) or 'prompt_token_ids' (integers)")
