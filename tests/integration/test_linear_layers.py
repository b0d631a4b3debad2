# SPDX-License-Identifier: Apache-2.0
"""vLLM's unquantised layers on packed weights: what is packed, what is left alone, and that no copy stays."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from vllm_arm import envs
from vllm_arm.linear import engines, unquantised

pytestmark = pytest.mark.usefixtures("patched_vllm")


def packable() -> torch.dtype | None:
    for scheme, dtype in engines.SCHEMES.items():
        if dtype.is_floating_point and engines.choose(scheme, 64, 64).engine in engines.PACKED:
            return dtype
    return None


@pytest.fixture(params=engines.PACKED, autouse=True)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> engines.Packed:
    """Each engine in turn, whatever the table says for this CPU."""
    rules = [rule._replace(isas=envs.ISA_NAMES) for rule in engines.TABLE if rule.engine == request.param]
    monkeypatch.setattr(engines, "TABLE", rules)
    if packable() is None:
        pytest.skip(f"{request.param} has no optimised product for this CPU")
    return engines.PACKED[request.param]


@pytest.fixture
def dtype(engine: engines.Packed) -> torch.dtype:
    """What the engine multiplies."""
    found = packable()
    assert found is not None
    return found


def make_layer(kind: type = torch.nn.Module, n: int = 96, k: int = 64) -> Any:
    layer: Any = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.weight = torch.nn.Parameter(torch.randn(n, k).to(packable()), requires_grad=False)
    layer.bias = None
    return layer


@pytest.fixture
def model_config(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    config = SimpleNamespace(head_dtype=dtype, hf_text_config=SimpleNamespace(tie_word_embeddings=True))
    monkeypatch.setattr(unquantised, "_model_config", lambda: config)
    yield config


def test_the_packed_weight_takes_the_plain_ones_place(dtype: torch.dtype) -> None:
    layer = make_layer(n=128)
    plain, x = layer.weight.detach().clone(), torch.randn(5, 64).to(packable())
    assert unquantised.pack_layer(layer, remove_weight=True)
    torch.testing.assert_close(layer.cpu_linear(x, layer.weight, None), functional.linear(x, plain))
    assert layer.weight.dtype == dtype
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert layer.weight.nbytes <= 1.05 * plain.nbytes
    assert layer.weight.shape != plain.shape


def test_torch_compile_takes_the_layer_as_a_parameter() -> None:
    layers = [make_layer(), make_layer()]
    for layer in layers:
        unquantised.pack_layer(layer, remove_weight=True)

    def model(x: torch.Tensor) -> torch.Tensor:
        return sum(layer.cpu_linear(x, layer.weight, None) for layer in layers)  # type: ignore[return-value]

    x = torch.randn(5, 64).to(packable())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("kind", ["meta", "3-D", "kv_b_proj", "int32"])
def test_what_is_no_plain_linear_layer_is_left_to_vllm(kind: str) -> None:
    layer = make_layer()
    if kind == "meta":
        layer.weight = torch.nn.Parameter(torch.empty(4, 4, device="meta"), requires_grad=False)
    if kind == "3-D":
        layer.weight = torch.nn.Parameter(torch.zeros(4, 1, 4), requires_grad=False)
    if kind == "kv_b_proj":
        layer._cpu_skip_gemm_dispatch = True
    if kind == "int32":
        layer.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int32), requires_grad=False)
    weight = layer.weight
    assert not unquantised.pack_layer(layer, remove_weight=True)
    assert layer.weight is weight
    assert not hasattr(layer, "cpu_linear")


def test_the_reason_for_vllms_own_is_given_once(
    engine: engines.Packed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = f"no luck with {engine.pack.__name__}"
    monkeypatch.setattr(engines, "choose", lambda *_: engines.Choice("vllm", "vLLM's own", reason))
    monkeypatch.setattr(unquantised.logger, "propagate", True)
    with caplog.at_level("WARNING", unquantised.logger.name):
        unquantised.logger.addHandler(caplog.handler)
        for _ in range(2):
            assert not unquantised.pack_layer(make_layer(), remove_weight=True)
        unquantised.logger.removeHandler(caplog.handler)
    given = {record.getMessage() for record in caplog.records}
    assert any(f"not packed by vllm-arm: {reason}" in message for message in given)


def test_tied_embeddings_and_the_head_share_one_packed_weight(model_config: SimpleNamespace) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embedding, head = make_layer(VocabParallelEmbedding), make_layer(ParallelLMHead)
    plain = embedding.weight.detach().clone()
    head.weight = embedding.weight
    assert unquantised.pack_layer(embedding, remove_weight=False)
    assert unquantised.pack_layer(head, remove_weight=False)
    assert head.weight is embedding.weight
    tokens = torch.tensor([3, 95, 3])
    assert torch.equal(embedding.quant_method.embedding(embedding, tokens), plain[tokens])
    x = torch.randn(5, 64).to(packable())
    torch.testing.assert_close(head.cpu_linear(x, head.weight, None), functional.linear(x, plain))


def test_an_untied_embedding_stays_plain_and_its_head_is_packed(model_config: SimpleNamespace) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    model_config.hf_text_config.tie_word_embeddings = False
    embedding, head = make_layer(VocabParallelEmbedding), make_layer(ParallelLMHead)
    plain = embedding.weight
    assert unquantised.pack_layer(embedding, remove_weight=False)
    assert embedding.weight is plain
    assert unquantised.pack_layer(head, remove_weight=False)
    assert head.weight.dim() == 1


def test_a_head_in_another_dtype_stays_plain(model_config: SimpleNamespace) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    model_config.head_dtype = torch.float64
    head = make_layer(ParallelLMHead)
    plain = head.weight
    assert unquantised.pack_layer(head, remove_weight=False)
    assert head.weight is plain


def test_the_hook_is_set_once_and_obeys_its_switch(engine: engines.Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", getattr(original, "__wrapped__", original))
    before = utils.dispatch_cpu_unquantized_gemm
    monkeypatch.setenv("VLLM_ARM_LINEAR", "0")
    unquantised.install()
    assert utils.dispatch_cpu_unquantized_gemm is before
    monkeypatch.setenv("VLLM_ARM_LINEAR", "1")
    unquantised.install()
    hooked = utils.dispatch_cpu_unquantized_gemm
    unquantised.install()
    assert utils.dispatch_cpu_unquantized_gemm is hooked
    assert hooked is not before
    layer = make_layer()
    hooked(layer, True)
    assert layer.weight.shape == engine.pack(torch.zeros(96, 64).to(packable())).shape
