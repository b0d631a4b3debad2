# SPDX-License-Identifier: Apache-2.0
"""``python -m demo``: serve a small model with vllm-arm, talk to it, measure it, stop it."""

import asyncio
import os
import time
from pathlib import Path

import click
from openai import APIConnectionError, AsyncOpenAI, OpenAI
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from demo.server import Server, ServerError, end_on_signals

PROJECT = Path(__file__).resolve().parent.parent
TRAINED_MODEL = PROJECT / "tests/models/tiny-llama"
LOG = PROJECT / "build/demo-server.log"
READY_SECONDS = 400
QUESTION = "What does `os.path.join` do?"
CODE = "def read_lines(path):\n    with open(path) as"

console = Console(highlight=False)


def ask(client: OpenAI, model: str) -> None:
    """One chat request, one completion request, one streamed answer."""
    messages = [{"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=48,
        temperature=0,
    )
    console.print(f"[bold]chat[/bold]        {QUESTION}")
    console.print(f"            {chat.choices[0].message.content!r}", markup=False)
    completion = client.completions.create(model=model, prompt=CODE, max_tokens=32, temperature=0)
    console.print(f"[bold]completion[/bold]  {CODE!r}")
    console.print(f"            {completion.choices[0].text!r}", markup=False)
    console.print("[bold]streaming[/bold]   ", end="")
    for event in client.completions.create(model=model, prompt="import ", max_tokens=32, temperature=0, stream=True):
        console.print(event.choices[0].text.replace("\n", "⏎"), end="", markup=False)
    console.print()


async def measure(url: str, model: str, requests: int, concurrency: int, tokens: int) -> Table:
    """Send ``requests`` completions, ``concurrency`` at a time, of ``tokens`` tokens each."""
    limit = asyncio.Semaphore(concurrency)
    latencies: list[float] = []
    generated = 0
    prompted = 0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("benchmark", total=requests)

        async def one(client: AsyncOpenAI, number: int) -> None:
            nonlocal generated, prompted
            async with limit:
                started = time.monotonic()
                answer = await client.completions.create(
                    model=model,
                    prompt=f"# {number}\n" + CODE * 8,
                    max_tokens=tokens,
                    extra_body={"ignore_eos": True},
                )
                latencies.append(time.monotonic() - started)
                assert answer.usage is not None, "the server gave no usage"
                generated += answer.usage.completion_tokens
                prompted += answer.usage.prompt_tokens
                progress.advance(task)

        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            started = time.monotonic()
            await asyncio.gather(*(one(client, number) for number in range(requests)))
            seconds = time.monotonic() - started
    latencies.sort()
    table = Table(title=f"{requests} requests, {concurrency} at a time, {os.cpu_count()} CPUs")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in (
        ("prompt tokens", f"{prompted}"),
        ("generated tokens", f"{generated}"),
        ("seconds", f"{seconds:.2f}"),
        ("generated tokens/s", f"{generated / seconds:.1f}"),
        ("requests/s", f"{requests / seconds:.2f}"),
        ("latency, median", f"{latencies[len(latencies) // 2]:.2f} s"),
        ("latency, longest", f"{latencies[-1]:.2f} s"),
    ):
        table.add_row(name, value)
    return table


def wait(server: Server) -> None:
    """Wait until the server answers, showing its last log line and the seconds."""
    started = time.monotonic()
    with console.status("starting vllm serve") as status:
        server.wait_until_ready(
            READY_SECONDS,
            lambda line: status.update(f"{time.monotonic() - started:4.0f} s  {line[: console.width - 12]}"),
        )
    console.print(f"vllm serve answers at {server.url} after {time.monotonic() - started:.0f} s")


def show_process(server: Server) -> None:
    """Show by inspection that mimalloc and one OpenMP runtime are in the worker."""
    worker = server.process_named("Worker")
    mapped = {Path(mapping.path).name for mapping in worker.memory_maps(grouped=True)}
    libraries = sorted(name for name in mapped if name.startswith(("libmimalloc", "libgomp")))
    console.print(f"the worker, process {worker.pid}, maps {', '.join(libraries)}")


@click.command()
@click.option("--model", type=Path, default=TRAINED_MODEL, show_default=False, help="Model folder.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of the server (default: free).")
@click.option("--requests", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--concurrency", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--compile/--eager", "compiled", default=False, help="Use torch.compile.")
def main(model: Path, port: int | None, requests: int, concurrency: int, tokens: int, compiled: bool) -> None:
    """Serve a small model with vllm-arm, talk to it, measure it, and stop it."""
    end_on_signals()
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    if os.uname().machine != "aarch64":
        environment["VLLM_ARM_FORCE"] = "1"
        console.print("This is no Arm machine: VLLM_ARM_FORCE=1 runs the portable kernels.")
    arguments = ("--max-model-len", "2048") + (() if compiled else ("--enforce-eager",))
    try:
        with Server(model, LOG, port=port, arguments=arguments, environment=environment) as server:
            wait(server)
            try:
                show_process(server)
                with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
                    ask(client, str(model))
                console.print(asyncio.run(measure(server.url, str(model), requests, concurrency, tokens)))
            except (APIConnectionError, ServerError) as error:
                if server.is_running():
                    raise
                raise ServerError(f"the server is gone: {error} (see {LOG})") from None
    except ServerError as error:
        raise click.ClickException(str(error)) from None
    console.print("the server is stopped")


if __name__ == "__main__":
    main()
