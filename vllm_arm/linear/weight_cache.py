# SPDX-License-Identifier: Apache-2.0
"""A cache on disk of weights that were quantised while they loaded, so that the next load reads nothing else.

``VLLM_ARM_WEIGHT_CACHE`` names its folder. There, a folder for each checkpoint's content, scheme and rank has a file
for each layer: a line of JSON, which says what made it and holds a checksum, and then safetensors. What is damaged, or
was made by another version or build, is ignored with a warning and written again.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

import vllm_arm
from vllm_arm import envs, ops
from vllm_arm.linear import engines
from vllm_arm.linear.checkpoint_digest import checkpoint_digest, write_atomically
from vllm_arm.logs import get_logger, info_once, warning_once

logger = get_logger(__name__)

FORMAT = 2
"""Of the files; another one makes all of them stale."""
_FORMATS_OF_CHECKPOINTS = ("auto", "hf", "safetensors", "pt")

Tensors = dict[str, torch.Tensor]


class WeightCache:
    """The quantised weights of one checkpoint, below ``folder``; ``maker`` is what they depend on beside it."""

    def __init__(self, folder: Path, maker: Mapping[str, object]) -> None:
        self.folder = folder
        self.maker = dict(maker)

    def load(self, name: str) -> Tensors | None:
        """What :meth:`store` was given for the layer of that name; None where there is nothing that can be used."""
        file = self._file(name)
        if not file.exists():
            return None
        try:
            # Read at once: a process that writes may put another file in this one's place at any moment.
            line, _, content = file.read_bytes().partition(b"\n")
            header = json.loads(line)
            if header["checksum"] != _checksum(content):
                raise ValueError("its checksum is wrong")
            if header["maker"] != self.maker:
                message = "stale, made by another version or build, so weights are quantised again"
                warning_once(logger, f"{self.folder}: {message}")
                return None
            # Copied into memory that is aligned as torch's own.
            return {key: tensor.clone() for key, tensor in load(content).items()}
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            logger.warning("%s: damaged, so the layer is quantised again: %s", file, error)
            return None

    def store(self, name: str, tensors: Tensors) -> None:
        """Keep ``tensors`` for the layer of that name. Where the disk refuses, a warning says so."""
        content = save(tensors)
        header = {"maker": self.maker, "checksum": _checksum(content)}
        try:
            write_atomically(self._file(name), json.dumps(header).encode() + b"\n" + content)
        except OSError as error:
            warning_once(logger, f"VLLM_ARM_WEIGHT_CACHE: quantised weights cannot be kept: {error}")

    def _file(self, name: str) -> Path:
        return self.folder / f"{name.replace('/', '_')}.weights"


def _checksum(content: bytes) -> str:
    return str(blake3.blake3(content).hexdigest(length=16))


def open_cache(vllm_config: Any, scheme: str, dtype: torch.dtype, rank: int, ranks: int) -> WeightCache | None:
    """The cache for a model that ``rank`` of ``ranks`` quantises by ``scheme`` from weights of ``dtype``.

    None where ``VLLM_ARM_WEIGHT_CACHE`` is unset, or where the model's weights are no files on this machine (yet).
    """
    root = envs.VLLM_ARM_WEIGHT_CACHE
    if root is None:
        return None
    if vllm_config.speculative_config is not None:
        info_once(
            logger, "VLLM_ARM_WEIGHT_CACHE: not used with speculative decoding, whose draft has layers of its own"
        )
        return None
    if vllm_config.load_config.load_format not in _FORMATS_OF_CHECKPOINTS:
        return None
    checkpoint = _local_checkpoint(vllm_config)
    try:
        digest = None if checkpoint is None else checkpoint_digest(checkpoint, root / "digests")
    except OSError as error:
        warning_once(logger, f"VLLM_ARM_WEIGHT_CACHE: not used: {error}")
        digest = None
    if checkpoint is None or digest is None:
        return None
    name = f"{checkpoint.resolve().name}-{digest[:16]}"
    part = f"{scheme}-{str(dtype).removeprefix('torch.')}-rank{rank}of{ranks}"
    info_once(logger, f"VLLM_ARM_WEIGHT_CACHE: quantised weights are kept in {root / name / part}")
    return WeightCache(root / name / part, _maker() | {"checkpoint": digest})


def _local_checkpoint(vllm_config: Any) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    model_config = vllm_config.model_config
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    try:
        found = snapshot_download(
            model_config.model,
            revision=model_config.revision,
            cache_dir=vllm_config.load_config.download_dir,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError):
        return None
    return Path(found)


@functools.cache
def _maker() -> dict[str, object]:
    """What decides how a weight is quantised and packed, beside the weight and the scheme."""
    import vllm

    package = Path(ops.__file__).parent.parent
    libraries = [package / "_C.so", *sorted(package.glob("lib/libdnnl*"))]
    return {
        "format": FORMAT,
        "vllm_arm": vllm_arm.__version__,
        "vllm": vllm.__version__,
        "isa": engines.machine_isa(),
        "kernels": [blake3.blake3(library.read_bytes()).hexdigest(length=8) for library in libraries],
    }
