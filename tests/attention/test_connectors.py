# SPDX-License-Identifier: Apache-2.0
"""KV transfer: which connectors are refused, and that NIXL's tell layouts apart."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

from vllm_arm import _host, ops
from vllm_arm.attention import connectors


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ARM_ATTENTION", raising=False)
    monkeypatch.setenv("VLLM_ARM_ISA", ops.active_isa("paged_attention"))
    # Put back after a test that replaces it.
    monkeypatch.setattr(base_worker, "compute_nixl_compatibility_hash", base_worker.compute_nixl_compatibility_hash)


def transfer(connector: str, **options: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=options)


def multi(*connectors: KVTransferConfig) -> KVTransferConfig:
    described = [
        {"kv_connector": each.kv_connector, "kv_connector_extra_config": each.kv_connector_extra_config}
        for each in connectors
    ]
    return transfer("MultiConnector", connectors=described)


@pytest.mark.parametrize(
    "config",
    [
        None,
        transfer("NixlConnector"),
        transfer("NixlPushConnector"),
        transfer("OffloadingConnector", cpu_bytes_to_use=1),
        transfer("SimpleCPUOffloadConnector"),
        multi(transfer("NixlConnector"), transfer("OffloadingConnector")),
    ],
    ids=str,
)
def test_connectors_that_cannot_mistake_a_layout(config: KVTransferConfig | None) -> None:
    connectors.check(config)


REFUSED = [
    (transfer("LMCacheConnectorV1"), "LMCacheConnectorV1"),
    (transfer("MooncakeConnector"), "MooncakeConnector"),
    (transfer("ExampleConnector", shared_storage_path="/shared"), "ExampleConnector"),
    (transfer("OffloadingConnector", spec_name="TieringOffloadingSpec"), "OffloadingConnector"),
    (multi(transfer("NixlConnector"), transfer("MooncakeStoreConnector")), "MooncakeStoreConnector"),
    (multi(multi(transfer("NixlConnector"))), "MultiConnector"),
]


@pytest.mark.parametrize(("config", "name"), REFUSED, ids=str)
def test_others_are_refused_by_name(config: KVTransferConfig, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"--kv-transfer-config: kv_connector {name} .* expected one of Nixl"):
        connectors.check(config)
    monkeypatch.setenv("VLLM_ARM_ATTENTION", "0")
    connectors.check(config)


def describe_server(block_size: int = 128, connector: KVTransferConfig | None = None) -> Any:
    model = SimpleNamespace(
        model="model",
        dtype=torch.bfloat16,
        get_total_num_kv_heads=lambda: 2,
        get_head_size=lambda: 64,
        get_total_num_hidden_layers=lambda: 2,
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=block_size),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        speculative_config=None,
        kv_transfer_config=connector or transfer("NixlConnector"),
    )


def hash_of(server: Any) -> str:
    return base_worker.compute_nixl_compatibility_hash(server, "CPU_ATTN", transfer_mode="pull")


def test_nixl_compares_layouts_and_block_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    server = describe_server()
    plain = hash_of(server)
    for _ in range(2):
        connectors.compare_layouts(server)
    with_ours = hash_of(server)
    # vLLM's own attention has the backend's name too.
    assert with_ours != plain
    assert hash_of(describe_server()) == with_ours
    assert hash_of(describe_server(block_size=64)) != with_ours
    monkeypatch.setattr(connectors, "layout", lambda: "another")
    assert hash_of(server) not in (plain, with_ours)


@pytest.mark.parametrize("connector", ["OffloadingConnector", "SimpleCPUOffloadConnector"])
def test_without_nixl_nothing_is_replaced(connector: str) -> None:
    before = base_worker.compute_nixl_compatibility_hash
    connectors.compare_layouts(describe_server(connector=transfer(connector)))
    assert base_worker.compute_nixl_compatibility_hash is before


def test_layouts_are_told_apart_by_variant_and_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    features = _host.Features()
    names = {}
    variants = ["portable", "neon", "bf16", "sve"]
    monkeypatch.setattr(_host, "operations", lambda: {"paged_attention": variants})
    for variant, sve_bytes in [*((each, 0) for each in variants[:3]), *(("sve", each) for each in (16, 32, 64, 128))]:
        monkeypatch.setattr(_host, "select_isa", lambda *_, variant=variant: variant)
        features.sve_bytes = sve_bytes
        names[variant, sve_bytes] = connectors.layout(features)
    # A vector that is longer than any kernel of ours knows.
    assert names.pop(("sve", 128)) == names["bf16", 0]
    assert len(set(names.values())) == len(names)
