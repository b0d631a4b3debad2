# SPDX-License-Identifier: Apache-2.0
"""KV transfer between servers: blocks go as they are, so both ends must lay them out alike.

How elements are ordered within a block depends on the kernel variant and the length of SVE's vectors. vLLM's NIXL
connectors compare a hash before the first transfer, into which we put the layout; others that share blocks with another
server, or keep them for a later one, compare nothing that could tell, and are refused.
"""

from typing import TYPE_CHECKING, Any

from vllm_arm import _host, envs
from vllm_arm.attention import selection

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

_NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
# These move no blocks, or none that outlive the server.
_LOCAL = ("DecodeBenchConnector", "ExampleHiddenStatesConnector", "SimpleCPUOffloadConnector")
_OFFLOADING, _LOCAL_OFFLOADING = "OffloadingConnector", "CPUOffloadingSpec"
_MULTI = "MultiConnector"


def layout(features: _host.Features | None = None) -> str:
    """The name of the order of elements within a block: where it is the same, so is the order."""
    features = features or _host.host_features()
    variant = _host.select_isa(_host.operations()["paged_attention"], features, envs.VLLM_ARM_ISA)
    # With vectors of a length that has no kernel of its own, keys lie as without SVE.
    has_own_order = variant == "sve" and features.sve_bytes in (16, 32, 64)
    name = f"sve{8 * features.sve_bytes}" if has_own_order else {"sve": "bf16"}.get(variant, variant)
    return f"vllm-arm-1-{name}"


def check(transfer: "KVTransferConfig | None") -> None:
    """Refuse a connector that could take blocks of another layout for ours.

    Raises ``ValueError`` naming the connector and what was expected.
    """
    if transfer is None or not selection.choice()[0]:
        return
    for connector, options in _connectors(transfer):
        if connector in (*_NIXL, *_LOCAL):
            continue
        if connector == _OFFLOADING and options.get("spec_name", _LOCAL_OFFLOADING) == _LOCAL_OFFLOADING:
            continue
        raise ValueError(
            f"--kv-transfer-config: kv_connector {connector} with {options or 'no options'} does not compare how the "
            f"blocks of two servers are laid out, expected one of {', '.join((*_NIXL, *_LOCAL))}, or {_OFFLOADING} "
            f"with {_LOCAL_OFFLOADING}; VLLM_ARM_ATTENTION=0 leaves attention and its cache to vLLM"
        )


def compare_layouts(vllm_config: "VllmConfig") -> None:
    """Make the layout a part of what NIXL connectors of this process compare, where one is to run."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not selection.choice()[0]:
        return
    if not any(connector in _NIXL for connector, _ in _connectors(transfer)):
        return
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    original = base_worker.compute_nixl_compatibility_hash
    if hasattr(original, "layout"):
        return

    def with_layout(vllm_config: "VllmConfig", attn_backend_name: str, transfer_mode: str = "pull") -> str:
        # Blocks of other sizes are taken apart and joined as if tokens followed one another in them.
        described = f"{attn_backend_name} {layout()} {vllm_config.cache_config.block_size}"
        return str(original(vllm_config, described, transfer_mode))

    with_layout.layout = layout()  # type: ignore[attr-defined]
    base_worker.compute_nixl_compatibility_hash = with_layout


def _connectors(transfer: "KVTransferConfig") -> list[tuple[str, dict[str, Any]]]:
    """The name and options of each connector; those within a MultiConnector in its place."""
    options = transfer.kv_connector_extra_config
    if transfer.kv_connector != _MULTI:
        return [(str(transfer.kv_connector), options)]
    return [
        (str(each.get("kv_connector")), each.get("kv_connector_extra_config", {}))
        for each in options.get("connectors", [])
    ]
