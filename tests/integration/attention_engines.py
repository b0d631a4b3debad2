# SPDX-License-Identifier: Apache-2.0
"""A program: makes engines one after the other, and writes what they answer as JSON.

``python -m tests.integration.attention_engines REQUEST FOLDER``. REQUEST is JSON: for each engine its name, the
arguments of ``LLM`` and the names of the functions here that ask it; FOLDER gets NAME.json for each. vLLM is imported
once, and each engine has a fork of this process.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams

from tests.integration.serving import TRAINED_MODEL
from tests.models.perplexity import held_out_token_windows, perplexity_from_logprobs, prompt_token_logprobs

# Many short answers: after a different token, what follows cannot be compared.
TOKENS = 16
LENGTHS = [1, 3, 16, 17, 40, 127, 128, 129, 200, 300] * 2 + [16] * 20
PERPLEXITY_WINDOWS = 16
# So low that sampling picks the best token, unless the two best are nearer than a near tie.
ALMOST_GREEDY = 0.001

Answers = list[dict[str, Any]]


def held_out(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Prompts of held-out text, of these lengths."""
    windows = held_out_token_windows(AutoTokenizer.from_pretrained(TRAINED_MODEL), len(lengths), max(lengths))
    return [{"prompt_token_ids": window[:length]} for window, length in zip(windows, lengths, strict=True)]


def answers(outputs: list[Any]) -> Answers:
    """The tokens of every completion and their margins over the second best."""
    found = []
    for output in outputs:
        for completion in output.outputs:
            best = [sorted((each.logprob for each in top.values()), reverse=True) for top in completion.logprobs]
            margins = [top[0] - top[1] for top in best]
            found.append({"tokens": list(completion.token_ids), "margins": margins})
    return found


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2, **settings)


def mixed(llm: LLM) -> Answers:
    """Prompts of many lengths at once, so that steps hold prefills and decodes."""
    return answers(llm.generate(held_out(LENGTHS), greedy(), use_tqdm=False))


def shared_prefixes(llm: LLM) -> Answers:
    """Prompts that share a beginning, twice: the second time all of them are in the cache, if there is one."""
    (document,) = held_out([400])
    tokens = document["prompt_token_ids"]
    prompts = [{"prompt_token_ids": tokens[:length]} for length in (150, 200, 256, 257, 300, 390)]
    return answers(llm.generate(prompts, greedy(), use_tqdm=False)) + answers(
        llm.generate(prompts, greedy(), use_tqdm=False)
    )


def repetitive(llm: LLM) -> Answers:
    """Text that repeats itself, whose continuation n-grams guess rightly."""
    prompts = [{"prompt_token_ids": window["prompt_token_ids"] * 3} for window in held_out([40] * 8)]
    return answers(llm.generate(prompts, greedy(), use_tqdm=False))


def parallel(llm: LLM) -> Answers:
    """Several samples of one prompt, which share its blocks. Without a seed, which vLLM cannot do on CPU in chunks."""
    settings = SamplingParams(n=3, temperature=ALMOST_GREEDY, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
    return answers(llm.generate(held_out([60, 130]), settings, use_tqdm=False))


def beams(llm: LLM) -> Answers:
    """The best two beams of each prompt; the margin is how far apart their logarithmic probabilities are."""
    outputs = llm.beam_search(held_out([30, 130]), BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True))
    found = []
    for output in outputs:
        best, second = output.sequences[:2]
        margin = best.cum_logprob - second.cum_logprob
        found.append({"tokens": [list(best.tokens)], "margins": [margin], "logprob": best.cum_logprob})
    return found


def random_prompts(llm: LLM) -> Answers:
    """Prompts for models with random weights, longer and shorter than their window."""
    generator = torch.Generator().manual_seed(0)
    prompts = [
        {"prompt_token_ids": torch.randint(5, 1000, (length,), generator=generator).tolist()}
        for length in (1, 5, 23, 24, 25, 64, 130, 300)
    ]
    return answers(llm.generate(prompts, greedy(), use_tqdm=False))


def given(llm: LLM) -> Answers:
    """Few tokens after prompts that ``prompts.json`` beside the model has, with the adapter that may be there too."""
    model = Path(llm.llm_engine.model_config.model)
    prompts = [{"prompt_token_ids": prompt} for prompt in json.loads((model / "prompts.json").read_text())]
    adapter = LoRARequest("adapter", 1, str(model / "adapter")) if (model / "adapter").exists() else None
    settings = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    return answers(llm.generate(prompts, settings, use_tqdm=False, lora_request=adapter))


def perplexity(llm: LLM, windows: int = PERPLEXITY_WINDOWS) -> float:
    """That of held-out text."""
    prompts = held_out([512] * windows)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    return perplexity_from_logprobs(
        prompt_token_logprobs(output.prompt_token_ids, output.prompt_logprobs) for output in outputs
    )


def short_perplexity(llm: LLM) -> float:
    """That of less text, to be compared with another model's of the same."""
    return perplexity(llm, 5)


def next_token_perplexity(llm: LLM, adapter: LoRARequest | None = None) -> float:
    """That of every eighth token, each generated: vLLM cannot judge prompts with an adapter on a CPU."""
    windows = [window["prompt_token_ids"] for window in held_out([256] * 5)]
    prefixes = [(window[:length], window[length]) for window in windows for length in range(16, 256, 8)]
    settings = SamplingParams(max_tokens=1, temperature=0, logprobs=llm.llm_engine.model_config.max_logprobs)
    prompts = [{"prompt_token_ids": prefix} for prefix, _ in prefixes]
    outputs = llm.generate(prompts, settings, use_tqdm=False, lora_request=adapter)
    return perplexity_from_logprobs(
        [output.outputs[0].logprobs[0][token].logprob] for output, (_, token) in zip(outputs, prefixes, strict=True)
    )


def adapted_perplexity(llm: LLM) -> float:
    """The same with the LoRA adapter that is below the model's folder."""
    adapter = Path(llm.llm_engine.model_config.model) / "adapter"
    return next_token_perplexity(llm, LoRARequest("adapter", 1, str(adapter)))


SENTENCES = [
    "A short one.",
    "Paged attention keeps the keys and values of every request in blocks of a cache.",
    "The quick brown fox jumps over the lazy dog, again and again, until both of them are tired of it. " * 6,
    "Encoders see the whole sentence at once.",
    "",
]


def embeddings(llm: LLM) -> list[list[float]]:
    """Those of :data:`SENTENCES`."""
    return [output.outputs.embedding for output in llm.embed(SENTENCES, use_tqdm=False)]


def backends(llm: LLM) -> list[str]:
    """The attention implementation of each layer."""
    return llm.apply_model(
        lambda model: [type(module.impl).__name__ for module in model.modules() if hasattr(module, "impl")]
    )[0]


def linear_kernels(llm: LLM) -> list[str]:
    """The classes of the kernels that run quantised linear layers."""

    def names(model: Any) -> list[str]:
        found = set()
        for module in model.modules():
            method = getattr(module, "scheme", getattr(module, "quant_method", None))
            for name in ("kernel", "fp8_linear", "linear_kernel", "int8_kernel"):
                if (kernel := getattr(method, name, None)) is not None:
                    found.add(type(kernel).__name__)
        return sorted(found)

    return llm.apply_model(names)[0]


def expert_methods(llm: LLM) -> list[str]:
    """The classes of what runs experts."""

    def names(model: Any) -> list[str]:
        kernels = (getattr(getattr(module, "quant_method", None), "moe_kernel", None) for module in model.modules())
        return sorted({type(kernel.fused_experts).__name__ for kernel in kernels if kernel is not None})

    return llm.apply_model(names)[0]


def head_method(llm: LLM) -> str:
    """The class of what runs the LM head."""
    return llm.apply_model(lambda model: type(model.lm_head.quant_method).__name__)[0]


QUESTIONS: dict[str, Callable[[LLM], Any]] = {
    function.__name__: function
    for function in (
        *(mixed, shared_prefixes, repetitive, parallel, beams, random_prompts, given),
        *(perplexity, short_perplexity, next_token_perplexity, adapted_perplexity, embeddings, backends),
        *(linear_kernels, expert_methods, head_method),
    )
}


def ask(engine: dict[str, Any], result: Path) -> None:
    """Make the engine, and write its answers to ``result``."""
    llm = LLM(**engine["arguments"])
    found = {}
    for name in engine["questions"]:
        begin = time.monotonic()
        found[name] = QUESTIONS[name](llm)
        print(f"{engine['name']}: {name} took {time.monotonic() - begin:.1f} s", flush=True)
    result.write_text(json.dumps(found))
    llm.llm_engine.engine_core.shutdown()


def main(request: Path, folder: Path) -> None:
    """Ask each engine of ``request`` in a process of its own: vLLM leaves too much behind for two in one."""
    for engine in json.loads(request.read_text()):
        child = multiprocessing.get_context("fork").Process(
            target=ask, args=(engine, folder / f"{engine['name']}.json")
        )
        child.start()
        child.join()
        if child.exitcode:
            sys.exit(f"engine {engine['name']} ended with {child.exitcode}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
