# SPDX-License-Identifier: Apache-2.0
"""The cache of quantised weights: keyed by content, unharmed by damage, and shared by processes."""

import logging
import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_arm.linear import checkpoint_digest, weight_cache
from vllm_arm.linear.weight_cache import WeightCache

LAYER = "model.layers.0.mlp.down_proj"


@pytest.fixture(autouse=True)
def vllm_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's logger keeps to itself where vLLM is loaded."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def make_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (48, 64), dtype=torch.int8, generator=generator)
    return {"codes": codes, "scales": torch.rand(48, generator=generator)}


def assert_same(actual: dict[str, torch.Tensor] | None, expected: dict[str, torch.Tensor]) -> None:
    assert actual is not None
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_what_is_stored_is_loaded(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "model", {"format": 1})
    assert cache.load(LAYER) is None
    cache.store(LAYER, make_tensors())
    assert_same(cache.load(LAYER), make_tensors())
    assert [file.name for file in cache.folder.iterdir()] == [f"{LAYER}.weights"], "nothing temporary is left"


@pytest.mark.parametrize("damage", ["bit", "header", "truncated", "empty"])
def test_a_damaged_file_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    cache = WeightCache(tmp_path, {})
    cache.store(LAYER, make_tensors())
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "bit":
        content[-5] ^= 4
    elif damage == "header":
        content[4] ^= 4
    file.write_bytes(content[: {"truncated": len(content) // 2, "empty": 0}.get(damage, len(content))])
    assert cache.load(LAYER) is None
    assert f"{LAYER}.weights: damaged" in caplog.text
    cache.store(LAYER, make_tensors(1))
    assert_same(cache.load(LAYER), make_tensors(1))


def test_a_stale_file_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    WeightCache(tmp_path, {"kernels": "old"}).store(LAYER, make_tensors())
    assert WeightCache(tmp_path, {"kernels": "new"}).load(LAYER) is None
    assert "stale, made by another version or build" in caplog.text
    assert_same(WeightCache(tmp_path, {"kernels": "old"}).load(LAYER), make_tensors())


def test_a_disk_that_refuses_is_named_and_nothing_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = WeightCache(tmp_path / "file/cache", {})
    cache.store(LAYER, make_tensors())
    assert "VLLM_ARM_WEIGHT_CACHE: quantised weights cannot be kept" in caplog.text


def _store_often(folder: Path, seed: int) -> None:
    cache = WeightCache(folder, {})
    for _ in range(200):
        cache.store(LAYER, make_tensors(seed))


def test_processes_that_write_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_store_often, args=(tmp_path, seed)) for seed in (0, 1)]
    for writer in writers:
        writer.start()
    cache, reads = WeightCache(tmp_path, {}), 0
    while any(writer.is_alive() for writer in writers):
        if (tensors := cache.load(LAYER)) is not None:
            reads += 1
            assert any(torch.equal(tensors["codes"], make_tensors(seed)["codes"]) for seed in (0, 1))
        elif reads:
            pytest.fail("a file that was there cannot be read")
    assert all(writer.exitcode == 0 for writer in writers)
    assert reads
    assert len(list(tmp_path.iterdir())) == 1


def make_checkpoint(folder: Path, value: float = 1.0) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"weight": torch.full((4, 4), value)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files count as written long ago."""
    now = time.time
    monkeypatch.setattr(checkpoint_digest.time, "time", lambda: now() + 60)


def test_the_digest_is_of_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    memory = tmp_path / "memory"
    first, same = make_checkpoint(tmp_path / "a"), make_checkpoint(tmp_path / "b")
    digest = checkpoint_digest.checkpoint_digest(first, memory)
    assert checkpoint_digest.checkpoint_digest(same, memory) == digest, "the place does not matter"
    file = first / "model.safetensors"
    times, content = file.stat(), file.read_bytes()
    file.write_bytes(content[:-1] + b"!")
    while file.stat().st_ctime_ns == times.st_ctime_ns:  # the clock of a file system is coarse
        file.touch()
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert checkpoint_digest.checkpoint_digest(first, memory) != digest, "though size, times and inode are the same"
    file.write_bytes(content)
    assert checkpoint_digest.checkpoint_digest(first, memory) == digest
    (first / "config.json").write_text('{"hidden_size": 4}')
    assert checkpoint_digest.checkpoint_digest(first, memory) != digest
    assert checkpoint_digest.checkpoint_digest(memory, memory) is None, "a folder without weights"


def test_files_are_read_once_while_they_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, checkpoint = tmp_path / "memory", make_checkpoint(tmp_path / "a")
    reads: list[Path] = []
    read = checkpoint_digest._read_digest
    monkeypatch.setattr(checkpoint_digest, "_read_digest", lambda file: (reads.append(file), read(file))[1])
    digests = {checkpoint_digest.file_digest(checkpoint / "model.safetensors", memory) for _ in range(2)}
    assert len(reads) == 2, "a file that was just written may change again with the same time"
    now = time.time
    monkeypatch.setattr(checkpoint_digest.time, "time", lambda: now() + 60)
    digests |= {checkpoint_digest.file_digest(checkpoint / "model.safetensors", memory) for _ in range(3)}
    assert len(reads) == 3
    for record in memory.iterdir():
        record.write_text("{")
    digests.add(checkpoint_digest.file_digest(checkpoint / "model.safetensors", memory))
    assert len(reads) == 4, "a damaged memory is none"
    assert len(digests) == 1


def open_cache(checkpoint: Path, **changes: Any) -> WeightCache | None:
    config = SimpleNamespace(
        speculative_config=changes.get("speculative"),
        load_config=SimpleNamespace(load_format=changes.get("load_format", "auto"), download_dir=None),
        model_config=SimpleNamespace(model=str(checkpoint), revision=None),
    )
    scheme, rank = changes.get("scheme", "int4-groups-of-32"), changes.get("rank", 0)
    return weight_cache.open_cache(config, scheme, changes.get("dtype", torch.bfloat16), rank, 2)


def test_the_cache_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each content, scheme, dtype and rank, where it was asked for and the weights are files."""
    monkeypatch.setattr(weight_cache, "_maker", lambda: {"format": 1})
    checkpoint = make_checkpoint(tmp_path / "llama")
    monkeypatch.delenv("VLLM_ARM_WEIGHT_CACHE", raising=False)
    assert open_cache(checkpoint) is None
    monkeypatch.setenv("VLLM_ARM_WEIGHT_CACHE", str(tmp_path / "cache"))
    found = [
        open_cache(checkpoint),
        open_cache(checkpoint, rank=1),
        open_cache(checkpoint, scheme="int8"),
        open_cache(checkpoint, dtype=torch.float16),
        open_cache(make_checkpoint(tmp_path / "other", 3.0)),
    ]
    assert all(cache is not None for cache in found)
    assert len({cache.folder for cache in found if cache is not None}) == len(found)
    assert open_cache(checkpoint, speculative=object()) is None
    assert open_cache(checkpoint, load_format="dummy") is None
    assert open_cache(tmp_path / "cache") is None, "a folder without weights"
    assert open_cache(Path("nobody/has-this-model")) is None
