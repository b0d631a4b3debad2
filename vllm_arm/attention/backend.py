# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention interfaces on one side, our ops on the other.

The classes extend those of vLLM's own CPU backend and keep its name, because vLLM asks for either in places. They share
none of its kernels: the cache's blocks have their own layout within, and the metadata their own schedule.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder, AttentionType, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec, KVQuantMode

from vllm_arm import ops
from vllm_arm.attention import selection

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec

_QUANTISED = (KVQuantMode.FP8_PER_TENSOR, KVQuantMode.INT8_PER_TOKEN_HEAD)
_SCALE_BYTES = 4  # of a token's key, and as many of its value, in each head
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class ArmAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]  # vLLM is not typed for mypy
    """What vLLM asks about us before it makes a layer."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(selection.DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(selection.KV_CACHE_DTYPES)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[MultipleOf]:
        """Blocks of any multiple of 16 tokens."""
        return [MultipleOf(ops.attention.PANEL_TOKENS)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Every head size that the kernels take."""
        return list(selection.HEAD_SIZES)

    @classmethod
    def supports_sink(cls) -> bool:
        """One more logit for each head in the sum of its softmax."""
        return True

    @classmethod
    def customize_spec(cls, spec: "AttentionSpec") -> "AttentionSpec":
        """Make room for the scales of a quantised cache in each block."""
        if spec.kv_quant_mode not in _QUANTISED or spec.state_content_bytes is not None:
            return spec
        return replace(spec, state_content_bytes=2 * spec.head_size + 2 * _SCALE_BYTES)

    @staticmethod
    def get_impl_cls() -> type["ArmAttentionImpl"]:
        """The class of a layer's attention."""
        return ArmAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["ArmAttentionMetadataBuilder"]:
        """The class that plans each step."""
        return ArmAttentionMetadataBuilder


@dataclass
class ArmAttentionMetadata(CPUAttentionMetadata):  # type: ignore[misc]
    """One step's batch. ``schedule`` is what :func:`vllm_arm.ops.schedule_attention` made for it."""

    schedule: torch.Tensor | None = None


class ArmAttentionMetadataBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Plans a step for the layers that share a block table."""

    def __init__(
        self,
        kv_cache_spec: "AttentionSpec",
        layer_names: list[str],
        vllm_config: "VllmConfig",
        device: torch.device,
    ) -> None:
        # Not the parent's own: that one picks one of vLLM's kernels, and refuses what they cannot do.
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        if kv_cache_spec.head_size_v != kv_cache_spec.head_size:
            raise ValueError(
                f"attention on CPU: values of size {kv_cache_spec.head_size_v}, keys of size "
                f"{kv_cache_spec.head_size}: expected the same in {', '.join(layer_names)}"
            )
        model_config = vllm_config.model_config
        # Some models have layers that differ in their heads; these layers do not.
        self.num_heads = get_num_attention_heads_from_layers(
            vllm_config, layer_names
        ) or model_config.get_num_attention_heads(vllm_config.parallel_config)
        self.num_kv_heads = kv_cache_spec.num_kv_heads
        self.head_size = kv_cache_spec.head_size
        self.block_size = kv_cache_spec.block_size
        self.dtype = model_config.dtype
        self.sliding_window = self._group_sliding_window()
        self.is_cross_attention = isinstance(kv_cache_spec, CrossAttentionSpec)
        self.is_encoder_only = isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)

    def build(
        self, common_prefix_len: int, common_attn_metadata: "CommonAttentionMetadata", fast_build: bool = False
    ) -> ArmAttentionMetadata:
        """The metadata of a step: its batch as vLLM describes it, and our schedule for it."""
        common = common_attn_metadata
        dynamic_causal = None
        causal = common.causal
        if isinstance(causal, torch.Tensor):
            dynamic_causal, causal = causal, False
        metadata = ArmAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            causal=causal and not self.is_cross_attention,
            dynamic_causal=dynamic_causal,
            schedule=ops.schedule_attention(
                common.query_start_loc,
                common.seq_lens,
                self.num_heads,
                self.num_kv_heads,
                causal and not self.is_cross_attention,
                self.sliding_window,
                dynamic_causal,
            ),
        )
        if self.is_encoder_only:
            self._add_encoder_cache(metadata)
        return metadata

    def _add_encoder_cache(self, metadata: ArmAttentionMetadata) -> None:
        """Give the step a cache of its own: an encoder keeps nothing, so vLLM has none for it.

        The requests' blocks follow one another in it, and every token of the batch has a slot.
        """
        blocks = (metadata.seq_lens + self.block_size - 1) // self.block_size
        first_blocks = (blocks.cumsum(0) - blocks).to(torch.int32)
        offsets = torch.arange(int(blocks.max()), dtype=torch.int32)
        metadata.block_table = first_blocks[:, None] + offsets

        begins = metadata.query_start_loc[:-1].long()
        lengths = metadata.query_start_loc.diff().long()
        # From a token's place in the batch to its slot is as far for all tokens of a request.
        shifts = (first_blocks * self.block_size - begins).repeat_interleave(lengths)
        metadata.slot_mapping = torch.full((metadata.num_actual_tokens,), -1, dtype=torch.int64)
        metadata.slot_mapping[: len(shifts)] = shifts + torch.arange(len(shifts))
        metadata.encoder_cache = torch.zeros(
            (int(blocks.sum()), self.num_kv_heads, self.block_size, 2 * self.head_size), dtype=self.dtype
        )


class ArmAttentionImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.is_encoder = attn_type in _ENCODERS
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            # The cache of an encoder lives for one step: there is nothing to save by quantising it.
            "auto" if self.is_encoder else kv_cache_dtype,
            None,  # vLLM's kernels have no cap in encoders, and it would warn of that
            attn_type,
            kv_sharing_target_layer_name,
            sinks,
        )
        self.logits_soft_cap = logits_soft_cap or 0.0

    def forward(
        self,
        layer: "AttentionLayer",
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: ArmAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of ``query`` ``[tokens, num_heads, head_size]`` to what the cache holds, into ``output``.

        ``key`` and ``value`` ``[tokens, num_kv_heads, head_size]`` are in the cache already, except in an encoder.
        Raises ``NotImplementedError`` where the output is to be quantised.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("attention on CPU: the output cannot be quantised within; turn that fusion off")
        if attn_metadata is None:  # vLLM warms the model up
            return output
        if self.is_encoder:
            kv_cache = attn_metadata.encoder_cache
            self._write(layer, key, value, kv_cache, attn_metadata.slot_mapping)
        tokens = attn_metadata.num_actual_tokens
        ops.paged_attention(
            output[:tokens],
            query[:tokens],
            kv_cache,
            attn_metadata.schedule,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.block_table,
            self.scale,
            attn_metadata.causal,
            self.sliding_window,
            attn_metadata.dynamic_causal,
            self.alibi_slopes,
            self.logits_soft_cap,
            None if self.sinks is None else self.sinks.float(),
            self.kv_cache_dtype,
            layer._k_scale_float,
            layer._v_scale_float,
        )
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write ``key`` and ``value`` ``[tokens, num_kv_heads, head_size]`` into the slots of ``slot_mapping``."""
        if not self.is_encoder:
            self._write(layer, key, value, kv_cache, slot_mapping)

    def _write(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        ops.write_kv_cache(
            key,
            value,
            kv_cache,
            slot_mapping,
            self.kv_cache_dtype,
            layer._k_scale_float,
            layer._v_scale_float,
        )
