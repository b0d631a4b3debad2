# SPDX-License-Identifier: Apache-2.0
"""Write the trained Llama as others quantise models: AWQ, GPTQ, compressed-tensors and FP8, by rounding to nearest.

The MLP is padded with zeros to a multiple of the groups, which changes nothing that the model computes. As a mixture of
experts, every expert has the MLP's neurons in an order of its own, so that whichever are chosen, the model is the same.
"""

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

TINY_LLAMA = Path(__file__).parent / "tiny-llama"
GROUP_SIZE = 32
INTERMEDIATE_SIZE = 768
FP8_BLOCK = 128
EXPERTS = 4
ADAPTER_RANK = 8

_MIXTRAL = {"gate_proj.weight": "w1.weight", "up_proj.weight": "w3.weight", "down_proj.weight": "w2.weight"}

# Of the sigmoid in its activation.
_GPT_OSS_SLOPE = 1.702

# Words of AWQ hold eight outputs in this order, the lowest bits first.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

_BY_TOKEN = {"strategy": "token", "dynamic": True}

Tensors = dict[str, torch.Tensor]


def make_quantised_llama(directory: Path | str, scheme: str, **options: Any) -> Path:
    """Write the trained model in ``scheme``, a key of :data:`SCHEMES`, to ``directory``; return its path.

    ``options`` are those of the scheme's function here.
    """
    tensors, changes = _quantised(padded_weights(), scheme, **options)
    return _write(Path(directory), tensors, changes)


def make_mixtral(directory: Path | str, scheme: str | None = None, **options: Any) -> Path:
    """Write the trained model as a Mixtral, in ``scheme`` as :func:`make_quantised_llama`, or else in bfloat16."""
    tensors: Tensors = {}
    for name, tensor in padded_weights().items():
        layer, _, projection = name.partition("mlp.")
        if not projection:
            tensors[name] = tensor
            continue
        for expert, order in enumerate(_orders(layer)):
            weight = tensor[:, order] if projection == "down_proj.weight" else tensor[order]
            tensors[f"{layer}block_sparse_moe.experts.{expert}.{_MIXTRAL[projection]}"] = weight.contiguous()
        if projection == "gate_proj.weight":
            tensors[f"{layer}block_sparse_moe.gate.weight"] = _router(layer)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    changes: dict[str, Any] = {"intermediate_size": INTERMEDIATE_SIZE}
    if scheme is not None:
        tensors, changes = _quantised(tensors, scheme, **options)
    changes |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    return _write(Path(directory), tensors, changes)


def make_gpt_oss(directory: Path | str) -> Path:
    """Write the trained model as a gpt-oss in bfloat16, whose activation and biases make the same of other weights.

    Its gate has a steeper sigmoid, to which the gate's weights are fitted; one is added to the rest, of which a bias
    takes it. What it clamps, and rounds beside that one, is lost.
    """
    llama = padded_weights()
    tensors = {name: tensor for name, tensor in llama.items() if ".mlp." not in name}
    for name, tensor in llama.items():
        if name.endswith("_proj.weight") and ".self_attn." in name:
            tensors[name.removesuffix("weight") + "bias"] = torch.zeros(len(tensor), dtype=torch.bfloat16)
    count = json.loads((TINY_LLAMA / "config.json").read_text())["num_hidden_layers"]
    for layer in (f"model.layers.{index}." for index in range(count)):
        gate, rest, down = (llama[f"{layer}mlp.{name}_proj.weight"].float() for name in ("gate", "up", "down"))
        pairs = torch.stack([gate / _GPT_OSS_SLOPE, rest * _GPT_OSS_SLOPE], 1)
        orders = _orders(layer)
        bias = torch.tensor([0.0, -1.0]).repeat(EXPERTS, INTERMEDIATE_SIZE)
        added = {
            "mlp.experts.gate_up_proj": torch.stack([pairs[order].flatten(0, 1).t() for order in orders]),
            "mlp.experts.gate_up_proj_bias": bias,
            "mlp.experts.down_proj": torch.stack([down[:, order].t() for order in orders]),
            "mlp.experts.down_proj_bias": torch.zeros(EXPERTS, len(down)),
            "mlp.router.weight": _router(layer),
            "mlp.router.bias": torch.zeros(EXPERTS),
            # So small that no attention goes there.
            "self_attn.sinks": torch.full((llama[f"{layer}self_attn.q_proj.weight"].shape[0] // 64,), -30.0),
        }
        tensors |= {layer + name: tensor.bfloat16().contiguous() for name, tensor in added.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    positions = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
    changes: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": 2048,
        "layer_types": ["full_attention"] * count,
        "rope_parameters": positions | {"original_max_position_embeddings": 2048},
        "tie_word_embeddings": False,
    }
    return _write(Path(directory), tensors, changes)


def _orders(layer: str) -> list[torch.Tensor]:
    """For each expert of the layer, the order of its neurons."""
    orders = []
    for expert in range(EXPERTS):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{layer}{expert}".encode()))
        orders.append(torch.randperm(INTERMEDIATE_SIZE, generator=generator))
    return orders


def _router(layer: str) -> torch.Tensor:
    """A router with random weights, which serves any model whose experts are all the same."""
    generator = torch.Generator().manual_seed(zlib.crc32(layer.encode()))
    hidden_size = json.loads((TINY_LLAMA / "config.json").read_text())["hidden_size"]
    return torch.randn(EXPERTS, hidden_size, generator=generator).bfloat16()


def _quantised(plain: Tensors, scheme: str, **options: Any) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of ``plain`` with linear layers in ``scheme``, and what changes in the configuration."""
    quantise, quantization_config = SCHEMES[scheme](**options)
    tensors: Tensors = {}
    for name, tensor in plain.items():
        if name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            parts = quantise(tensor.float())
            tensors |= {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
        else:
            tensors[name] = tensor
    return tensors, {"intermediate_size": INTERMEDIATE_SIZE, "quantization_config": quantization_config}


def make_untied_llama(directory: Path | str) -> Path:
    """Write the trained model with an LM head of its own, equal to its embeddings; return the path."""
    tensors = padded_weights()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    changes = {"intermediate_size": INTERMEDIATE_SIZE, "tie_word_embeddings": False}
    return _write(Path(directory), tensors, changes)


def add_adapter(directory: Path, scale: float = 0.5) -> Path:
    """Write a LoRA adapter for the model in ``directory``, below it; return the path of the adapter.

    It adds random matrices of rank ``ADAPTER_RANK`` to every linear layer, ``scale`` times as large as the weights.
    """
    tensors: Tensors = {}
    for name, (first, second) in _adapter(scale).items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{prefix}.lora_A.weight": first, f"{prefix}.lora_B.weight": second}
    adapter = directory / "adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    modules = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_RANK, "target_modules": modules}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter


def make_merged_llama(directory: Path | str, scale: float = 0.5) -> Path:
    """Write the trained model with what :func:`add_adapter` adds to it; return the path. A ``scale`` of 0 adds none."""
    tensors = padded_weights()
    for name, (first, second) in _adapter(scale).items():
        tensors[name] = (tensors[name].float() + second.float() @ first.float()).bfloat16()
    return _write(Path(directory), tensors, {"intermediate_size": INTERMEDIATE_SIZE})


def _adapter(scale: float) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """For each linear layer's weight ``[n, k]`` factors ``[rank, k]`` and ``[n, rank]``."""
    factors = {}
    for name, weight in padded_weights().items():
        if name.endswith("_proj.weight"):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            first = torch.randn(ADAPTER_RANK, weight.shape[1], generator=generator)
            second = torch.randn(weight.shape[0], ADAPTER_RANK, generator=generator)
            size = scale * weight.float().square().mean().sqrt() / ADAPTER_RANK**0.5
            factors[name] = first.bfloat16(), (size * second).bfloat16()
    return factors


def _write(directory: Path, tensors: Tensors, changes: dict[str, Any]) -> Path:
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((TINY_LLAMA / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TINY_LLAMA / name, directory / name)
    return directory


def padded_weights() -> Tensors:
    """The trained model's tensors, with ``INTERMEDIATE_SIZE`` in its MLPs."""
    tensors = load_file(TINY_LLAMA / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("down_proj.weight"):
            tensors[name] = pad(tensor, (0, INTERMEDIATE_SIZE - tensor.shape[1]))
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name] = pad(tensor, (0, 0, 0, INTERMEDIATE_SIZE - tensor.shape[0]))
    return tensors


def round_to_groups(
    weight: torch.Tensor, bits: int, group_size: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes ``[n, k]`` from 0, scales ``[n, groups]`` and zero points of the same: int32, fp32, int32."""
    groups = weight.unflatten(1, (-1, group_size))
    largest = (1 << bits) - 1
    if symmetric:
        scales = groups.abs().amax(2) / (largest // 2)
        zero_points = torch.full(scales.shape, (largest + 1) // 2)
    else:
        least = groups.amin(2).clamp(max=0)
        scales = (groups.amax(2).clamp(min=0) - least) / largest
        zero_points = (-least / scales.clamp(min=1e-10)).round()
    scales = scales.clamp(min=1e-10)
    codes = ((groups / scales[:, :, None]).round() + zero_points[:, :, None]).clamp(0, largest)
    return codes.flatten(1).int(), scales, zero_points.int()


def pack_words(numbers: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Int32 words that hold ``numbers`` along ``dim``, the lowest bits first, or in ``order``."""
    count = 32 // bits
    parts = numbers.long().unflatten(dim, (-1, count))
    words = torch.zeros_like(parts.select(dim + 1, 0))
    for position, source in enumerate(order or range(count)):
        words |= parts.select(dim + 1, source) << bits * position
    return words.to(torch.int32)


Quantise = Callable[[torch.Tensor], Tensors]


def awq(group_size: int = GROUP_SIZE) -> tuple[Quantise, dict[str, Any]]:
    """Four bits with zero points, inputs first."""

    def quantise(weight: torch.Tensor) -> Tensors:
        codes, scales, zero_points = round_to_groups(weight, 4, group_size, symmetric=False)
        return {
            "qweight": pack_words(codes.t(), 4, 1, _AWQ_ORDER),
            "qzeros": pack_words(zero_points.t(), 4, 1, _AWQ_ORDER),
            "scales": scales.t().half(),
        }

    return quantise, {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}


def gptq(symmetric: bool = True, group_size: int = GROUP_SIZE) -> tuple[Quantise, dict[str, Any]]:
    """Four bits, inputs first; the zero points are stored less one."""

    def quantise(weight: torch.Tensor) -> Tensors:
        codes, scales, zero_points = round_to_groups(weight, 4, group_size, symmetric)
        return {
            "qweight": pack_words(codes.t(), 4, 0),
            "qzeros": pack_words((zero_points.t() - 1) & 15, 4, 1),
            "scales": scales.t().half(),
            "g_idx": (torch.arange(weight.shape[1]) // group_size).int(),
        }

    config = {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": False, "sym": symmetric}
    return quantise, config | {"checkpoint_format": "gptq"}


def auto_round() -> tuple[Quantise, dict[str, Any]]:
    """Intel's AutoRound, which stores what GPTQ does."""
    quantise, config = gptq()
    return quantise, {
        **{name: config[name] for name in ("bits", "group_size", "sym")},
        **{"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int"},
    }


def packed(
    bits: int = 4, symmetric: bool = True, group_size: int | None = GROUP_SIZE, activations: bool = False
) -> tuple[Quantise, dict[str, Any]]:
    """compressed-tensors' packed weights, of 4 or 8 bits; without ``group_size``, a scale for each output."""

    def quantise(weight: torch.Tensor) -> Tensors:
        codes, scales, zero_points = round_to_groups(weight, bits, group_size or weight.shape[1], symmetric)
        tensors = {
            "weight_packed": pack_words(codes, bits, 1),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        return tensors if symmetric else tensors | {"weight_zero_point": pack_words(zero_points, bits, 0)}

    inputs = _integers(8, True, None) | _BY_TOKEN if activations else None
    return quantise, _compressed("pack-quantized", _integers(bits, symmetric, group_size), inputs)


def integers(
    bits: int = 8, group_size: int | None = None, symmetric_activations: bool = True
) -> tuple[Quantise, dict[str, Any]]:
    """compressed-tensors' int8 storage of 8 or 4 bits, with activations quantised for each token."""

    def quantise(weight: torch.Tensor) -> Tensors:
        codes, scales, zero_points = round_to_groups(weight, bits, group_size or weight.shape[1], symmetric=True)
        return {"weight": (codes - zero_points[0, 0]).to(torch.int8), "weight_scale": scales}

    activations = _integers(8, symmetric_activations, None) | _BY_TOKEN
    return quantise, _compressed("int-quantized", _integers(bits, True, group_size), activations)


def fp8(strategy: str = "channel", activations: bool = True) -> tuple[Quantise, dict[str, Any]]:
    """compressed-tensors' FP8, with a scale for each output or (``tensor``) for the whole weight."""

    def quantise(weight: torch.Tensor) -> Tensors:
        largest = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max().view(1)
        return _to_fp8(weight, largest / 448, "weight_scale")

    numbers = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    inputs = numbers | _BY_TOKEN if activations else None
    return quantise, _compressed("float-quantized", numbers | {"strategy": strategy}, inputs)


def fp8_plain(blocks: bool = False) -> tuple[Quantise, dict[str, Any]]:
    """FP8 as ``quant_method: fp8`` has it: a scale and a static one of activations for each weight, or in blocks."""

    def quantise(weight: torch.Tensor) -> Tensors:
        if not blocks:
            return _to_fp8(weight, (weight.abs().max() / 448).view(()), "weight_scale") | {
                "input_scale": torch.tensor(0.1)
            }
        tiles = weight.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
        scales = tiles.abs().amax((1, 3)) / 448
        tensors = _to_fp8(
            weight, scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1), "weight_scale_inv"
        )
        return tensors | {"weight_scale_inv": scales}

    config = {"quant_method": "fp8", "activation_scheme": "dynamic" if blocks else "static"}
    return quantise, config | ({"weight_block_size": [FP8_BLOCK, FP8_BLOCK]} if blocks else {})


def _to_fp8(weight: torch.Tensor, scales: torch.Tensor, name: str) -> Tensors:
    return {"weight": (weight / scales.clamp(min=1e-10)).to(torch.float8_e4m3fn), name: scales}


def _integers(bits: int, symmetric: bool, group_size: int | None) -> dict[str, Any]:
    strategy = "channel" if group_size is None else "group"
    numbers = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, "strategy": strategy}
    return numbers if group_size is None else numbers | {"group_size": group_size}


def _compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


SCHEMES: dict[str, Callable[..., tuple[Quantise, dict[str, Any]]]] = {
    function.__name__: function for function in (awq, gptq, auto_round, packed, integers, fp8, fp8_plain)
}
