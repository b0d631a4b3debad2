# SPDX-License-Identifier: Apache-2.0
"""One process of the accuracy benchmark: ``python -m benchmarks.quality.worker SPEC`` asks a model and writes answers.

``SPEC`` is a JSON file with ``arguments`` of ``vllm serve``, ``questions`` and the path of the ``result``.
"""

import dataclasses
import functools
import importlib.metadata
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.quality import held_out_task
from benchmarks.serving.worker import RequestsDone, announce, engine_arguments
from tests.models.perplexity import held_out_token_windows, perplexity_from_logprobs
from vllm_arm import compat


def windows_of(tokenizer: Any, questions: dict[str, Any]) -> list[list[int]]:
    """The pieces of text, as tokens. Raises ``ValueError`` where the file has too few."""
    count, length = questions["windows"], questions["length"]
    if questions["text"] is None:
        return held_out_token_windows(tokenizer, count, length)
    tokens = tokenizer.encode(Path(questions["text"]).read_text(encoding="utf-8"))
    windows = [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]
    if len(windows) < count:
        raise ValueError(f"--windows: the text has {len(windows)} of {length} tokens, expected at most so many")
    return windows[:count]


def best_tokens(prompt_logprobs: list[Any]) -> list[int]:
    """The most likely token at each position but the first."""
    return [min(candidates, key=lambda token: candidates[token].rank) for candidates in prompt_logprobs[1:]]


def own_logprobs(token_ids: list[int], prompt_logprobs: list[Any]) -> list[float]:
    """The logarithmic probability of each token but the first."""
    return [found[token].logprob for token, found in zip(token_ids[1:], prompt_logprobs[1:], strict=True)]


def ask(spec: dict[str, Any]) -> dict[str, Any]:
    """Load the model and put the questions to it."""
    announce("loading the model")
    from vllm import LLM, SamplingParams

    questions = spec["questions"]
    begin = time.monotonic()
    llm = LLM.from_engine_args(engine_arguments({"engine_arguments": spec["arguments"]}))
    load_seconds = time.monotonic() - begin
    windows = windows_of(llm.get_tokenizer(), questions)
    judged = llm.generate(
        [{"prompt_token_ids": window} for window in windows],
        SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False),
        use_tqdm=functools.partial(RequestsDone, phase="perplexity"),
    )
    continued = llm.generate(
        [{"prompt_token_ids": window[: questions["prompt_tokens"]]} for window in windows[: questions["prompts"]]],
        SamplingParams(temperature=0, max_tokens=questions["tokens"], ignore_eos=True, detokenize=False),
        use_tqdm=functools.partial(RequestsDone, phase="greedy"),
    )
    return {
        "load_seconds": load_seconds,
        "perplexity": perplexity_from_logprobs(
            own_logprobs(output.prompt_token_ids, output.prompt_logprobs) for output in judged
        ),
        "best_tokens": [best_tokens(output.prompt_logprobs) for output in judged],
        "continuations": [list(output.outputs[0].token_ids) for output in continued],
    }


def task_folders(questions: dict[str, Any], folder: Path) -> list[str]:
    """Where lm-eval looks for tasks besides its own; our own is written to ``folder``, if it is asked for."""
    given = [] if questions["task_folder"] is None else [questions["task_folder"]]
    if held_out_task.NAME not in questions["tasks"]:
        return given
    held_out_task.write(folder)
    return [str(folder), *given]


def answer_for_vllm() -> None:
    """lm-eval asks for the version of a distribution named ``vllm``; where another one has the package, give that's."""
    known = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return str(compat.vllm_version()) if distribution_name == "vllm" else known(distribution_name)

    importlib.metadata.version = version


def evaluate(spec: dict[str, Any]) -> dict[str, float]:
    """The scores of lm-eval's tasks, each its first metric."""
    answer_for_vllm()
    from lm_eval import simple_evaluate  # type: ignore[import-not-found, unused-ignore]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found, unused-ignore]
    from vllm.engine.arg_utils import EngineArgs

    announce("lm-eval")
    chosen = engine_arguments({"engine_arguments": spec["arguments"]})
    usual = EngineArgs(model=chosen.model)
    changed = {
        field.name: getattr(chosen, field.name)
        for field in dataclasses.fields(EngineArgs)
        if getattr(chosen, field.name) != getattr(usual, field.name)
    }
    questions = spec["questions"]
    with tempfile.TemporaryDirectory(prefix="tasks-") as folder:
        found = simple_evaluate(
            model="vllm",
            model_args={"pretrained": chosen.model, **changed},
            tasks=questions["tasks"],
            task_manager=TaskManager(include_path=task_folders(questions, Path(folder))),
            limit=questions["limit"],
            bootstrap_iters=0,
        )
    scores = {}
    for task, metrics in found["results"].items():
        name = next(name for name, value in metrics.items() if isinstance(value, float) and "stderr" not in name)
        scores[f"{task} {name.partition(',')[0]}"] = metrics[name]
    return scores


def main() -> None:
    """Answer the specification that the command line names."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    answers = {"scores": evaluate(spec)} if spec["evaluate"] else ask(spec)
    Path(spec["result"]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
