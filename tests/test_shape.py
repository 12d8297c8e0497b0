"""Models that are not there, against files of the same shape."""

from dataclasses import replace
from pathlib import Path

import pytest
from models import Type, write_tiny_moe

from longhaul.budget import kv_cache_bytes
from longhaul.errors import ConfigError
from longhaul.gguf_header import bytes_per_weight
from longhaul.index import read_index
from longhaul.shape import Shape, model_of

SHAPE = Shape(
    n_layer=3,
    n_expert=8,
    n_expert_used=2,
    n_embd=64,
    n_ff_exp=96,
    bytes_per_weight=4.0,
    n_head=4,
    n_head_kv=2,
    head_size=16,
    n_vocab=128,
    n_ctx_train=512,
)


def test_it_is_like_the_file(tmp_path: Path) -> None:
    written = read_index(write_tiny_moe(tmp_path / "m.gguf"))
    shape = replace(
        SHAPE,
        n_head=written.n_head,
        n_head_kv=written.n_head_kv[0],
        head_size=written.n_embd_head_k,
        n_ctx_train=written.n_ctx_train,
    )
    found = model_of(shape)
    assert found.expert_bytes == written.expert_bytes > 0
    assert found.token_cycle_bytes == written.token_cycle_bytes
    assert [x.expert_bytes for x in found.layers] == [x.expert_bytes for x in written.layers]
    assert kv_cache_bytes(found, 256) == kv_cache_bytes(written, 256)
    assert found.dense_bytes == pytest.approx(written.dense_bytes, rel=0.02)


def test_dense_and_shared_parts_count_as_resident() -> None:
    plain = model_of(SHAPE)
    shared = model_of(replace(SHAPE, n_ff_shared=96))
    assert shared.dense_bytes - plain.dense_bytes == 3 * 3 * 64 * 96 * 4
    mixed = model_of(replace(SHAPE, n_layer_dense=1, n_ff=256))
    assert [layer.layer for layer in mixed.layers] == [1, 2]
    assert mixed.dense_bytes - plain.dense_bytes == 3 * 64 * 256 * 4 - 4 * 64 * 8
    assert mixed.expert_bytes * 3 == plain.expert_bytes * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_layer": 0}, "n_layer is 0; it is 1 to 512"),
        ({"n_head_kv": -1}, "n_head_kv is -1"),
        ({"n_expert": 1025}, "n_expert is 1025; it is 1 to 1024"),
        ({"n_expert_used": 9}, "9 of 8 experts"),
        ({"n_layer_dense": 3}, "3 of 3 layers"),
        ({"n_layer_dense": 1}, "need n_ff"),
    ],
)
def test_shapes_that_cannot_be(change: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(SHAPE, **change)  # type: ignore[arg-type]


def test_bytes_per_weight() -> None:
    assert bytes_per_weight("Q4_0") == 18 / 32
    assert bytes_per_weight("q8_0") == 34 / 32
    assert bytes_per_weight(Type.F16.name) == 2
    with pytest.raises(ConfigError, match="'Q9' is no type"):
        bytes_per_weight("Q9")
