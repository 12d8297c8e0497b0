from pathlib import Path

import pytest

from longhaul.experts import ExpertKey, ExpertTensor, MoeLayer, MoeModel, Span


def layer(il: int, n_expert: int, n_expert_used: int, *slices: int) -> MoeLayer:
    tensors = tuple(
        ExpertTensor(f"blk.{il}.ffn_{part}_exps.weight", il, 0, 4096, n_expert, size, "F32")
        for part, size in zip(("down", "gate", "up"), slices, strict=False)
    )
    return MoeLayer(il, n_expert, n_expert_used, tensors)


def model(*layers: MoeLayer) -> MoeModel:
    return MoeModel(
        path=Path("m.gguf"),
        shards=(Path("m.gguf"),),
        arch="qwen3moe",
        name="m",
        layers=layers,
        dense_bytes=7,
        n_layer=len(layers),
        n_ctx_train=256,
        n_embd=64,
        n_vocab=32,
        n_head_kv=(2,) * len(layers),
        n_embd_head_k=16,
        n_embd_head_v=16,
    )


def test_span_of_each_expert_follows_the_one_before() -> None:
    tensor = ExpertTensor("blk.3.ffn_gate_exps.weight", 3, 1, 1000, 4, 50, "Q4_0")
    assert [tensor.span(expert) for expert in range(4)] == [
        Span(1, 1000, 50),
        Span(1, 1050, 50),
        Span(1, 1100, 50),
        Span(1, 1150, 50),
    ]


@pytest.mark.parametrize("expert", [-1, 4])
def test_span_of_an_expert_that_is_not_there_is_refused(expert: int) -> None:
    tensor = ExpertTensor("blk.3.ffn_gate_exps.weight", 3, 1, 1000, 4, 50, "Q4_0")
    with pytest.raises(IndexError, match=r"blk\.3\.ffn_gate_exps\.weight has experts 0 to 3"):
        tensor.span(expert)


def test_expert_bytes_add_up_over_tensors_of_different_types() -> None:
    assert layer(0, 8, 2, 10, 20, 30).expert_bytes == 60
    assert layer(0, 8, 2, 10, 20, 30).total_bytes == 480


def test_model_adds_up_over_layers_of_different_size() -> None:
    moe = model(layer(1, 8, 2, 10, 20, 30), layer(2, 4, 3, 5))
    assert moe.is_moe
    assert moe.expert_bytes == 8 * 60 + 4 * 5
    assert moe.token_cycle_bytes == 2 * 60 + 3 * 5


def test_model_without_routed_experts_is_dense() -> None:
    dense = model()
    assert not dense.is_moe
    assert dense.expert_bytes == dense.token_cycle_bytes == 0


def test_keys_sort_by_layer_then_expert() -> None:
    keys = [ExpertKey(2, 0), ExpertKey(0, 9), ExpertKey(0, 1)]
    assert sorted(keys) == [ExpertKey(0, 1), ExpertKey(0, 9), ExpertKey(2, 0)]
