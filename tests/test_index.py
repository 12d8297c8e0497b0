from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import (
    DENSE,
    F32,
    Q4_0,
    Raw,
    Value,
    experts,
    moe,
    moe_fields,
    refusal,
    shard_path,
    split,
    write,
)

from longhaul.errors import MissingShardError, ModelError, ModelFormatError, ModelUnsupportedError
from longhaul.index import read_first_shard, read_index

# --- what is found --------------------------------------------------------------------------------


def test_layers_and_figures_of_a_model(tmp_path: Path) -> None:
    model = read_index(moe(tmp_path / "m.gguf"))
    assert (model.arch, model.name, model.n_layer, model.n_ctx_train) == (
        "qwen3moe",
        "tiny",
        2,
        256,
    )
    assert (model.n_embd, model.n_vocab, model.n_head, model.n_head_kv) == (64, 3, 4, (2, 2))
    assert (model.n_embd_head_k, model.n_embd_head_v, model.n_ff, model.n_ff_exp) == (
        16,
        16,
        96,
        32,
    )
    assert [(layer.layer, layer.n_expert, layer.n_expert_used) for layer in model.layers] == [
        (0, 8, 2),
        (1, 8, 2),
    ]
    q4, q8, f32 = 64 * 32 // 32 * 18, 64 * 32 // 32 * 34, 64 * 32 * 4
    assert [layer.expert_bytes for layer in model.layers] == [2 * q4 + q8, 2 * q4 + f32]
    assert model.dense_bytes == (64 * 3 + 64 * 64) * 4
    assert model.expert_bytes + model.dense_bytes == sum(
        tensor.size_bytes for tensor in [*DENSE, *experts(0), *experts(1, down=F32)]
    )
    assert (model.path, model.shards) == (tmp_path / "m.gguf", (tmp_path / "m.gguf",))


def test_spans_hold_the_bytes_that_the_gguf_package_wrote(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for key, value in moe_fields().items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
    data = {
        part: np.random.default_rng(i).random((8, 32, 64), dtype=np.float32)
        for i, part in enumerate(("gate", "up", "down"))
    }
    writer.add_tensor("output.weight", np.ones((3, 5), dtype=np.float32))
    for part, array in data.items():
        writer.add_tensor(f"blk.1.ffn_{part}_exps.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    raw = path.read_bytes()
    (layer,) = read_index(path).layers
    assert [tensor.name.split("_")[1] for tensor in layer.tensors] == ["down", "gate", "up"]
    for tensor in layer.tensors:
        for expert in range(8):
            span = tensor.span(expert)
            part = tensor.name.split("_")[1]
            stored = raw[span.offset : span.offset + span.size_bytes]
            assert stored == data[part][expert].tobytes()


def test_only_routed_weights_count_as_experts(tmp_path: Path) -> None:
    others = [
        Raw("blk.0.ffn_gate_exps.bias", (32, 8)),
        Raw("blk.0.ffn_gate_exps.scale", (8,)),
        Raw("blk.0.ffn_gate_shexp.weight", (64, 32)),
        Raw("blk.0.ffn_gate_chexps.weight", (64, 32, 8)),
        Raw("blk.0.ffn_norm_exps.weight", (64,)),
        Raw("blk.0.ffn_gate_inp.weight", (64, 8)),
    ]
    model = read_index(write(tmp_path / "m.gguf", moe_fields(), [*others, *experts(0)]))
    assert len(model.layers[0].tensors) == 3
    assert model.dense_bytes == sum(tensor.size_bytes for tensor in others)


def test_fused_gate_and_up_is_found(tmp_path: Path) -> None:
    fused = [Raw("blk.1.ffn_gate_up_exps.weight", (64, 64, 8)), experts(1)[1]]
    (layer,) = read_index(write(tmp_path / "m.gguf", moe_fields(), fused)).layers
    assert layer.layer == 1
    assert layer.expert_bytes == 64 * 64 * 4 + 64 * 32 // 32 * 34


def test_number_of_experts_used_may_differ_by_layer(tmp_path: Path) -> None:
    path = moe(tmp_path / "m.gguf", qwen3moe__expert_used_count=[3, 1])
    assert [layer.n_expert_used for layer in read_index(path).layers] == [3, 1]


def test_a_type_that_llama_cpp_knows_and_gguf_may_not(tmp_path: Path) -> None:
    tensors = [Raw(tensor.name, (64, 32, 8), 42) for tensor in experts(0)]
    (layer,) = read_index(write(tmp_path / "m.gguf", moe_fields(), tensors)).layers
    assert layer.tensors[0].type_name == "Q2_0"
    assert layer.expert_bytes == 3 * 32 * 18


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = read_index(moe(tmp_path / "m.gguf", qwen3moe__nextn_predict_layers=1))
    assert [layer.layer for layer in model.layers] == [0]
    assert model.mtp_bytes == sum(tensor.size_bytes for tensor in experts(1, down=F32))


def test_recurrent_layers_keep_state_instead_of_keys(tmp_path: Path) -> None:
    fields = moe_fields(
        qwen3moe__ssm__inner_size=64,
        qwen3moe__ssm__state_size=16,
        qwen3moe__ssm__group_count=2,
        qwen3moe__ssm__conv_kernel=4,
    )
    tensors = [Raw("blk.0.ssm_out.weight", (64, 64)), Raw("blk.1.attn_k.weight", (64, 32))]
    model = read_index(write(tmp_path / "m.gguf", fields, [*tensors, *experts(0)]))
    assert model.n_head_kv == (0, 2)
    assert model.state_bytes == 4 * (3 * (64 + 2 * 2 * 16) + 16 * 64)


@pytest.mark.parametrize(
    ("name", "expected"), [("a\n b\r\n", "a b"), ([1] * 50, ""), (7, ""), ("x" * 5000, "")]
)
def test_a_name_is_one_line_of_text_or_none(tmp_path: Path, name: Value, expected: str) -> None:
    assert read_index(moe(tmp_path / "m.gguf", general__name=name)).name == expected


def test_dense_model_has_no_layers(tmp_path: Path) -> None:
    fields: dict[str, Value] = {"general.architecture": "llama", "llama.block_count": 1}
    model = read_index(write(tmp_path / "m.gguf", fields, DENSE))
    assert not model.is_moe
    assert model.dense_bytes == sum(tensor.size_bytes for tensor in DENSE)


def test_a_model_of_another_kind_is_dense(tmp_path: Path) -> None:
    model = read_index(write(tmp_path / "m.gguf", {"general.architecture": "clip"}, DENSE))
    assert (model.layers, model.n_layer, model.n_ctx_train) == ((), 0, 0)


# --- shards ---------------------------------------------------------------------------------------


def test_each_tensor_is_read_from_the_shard_that_owns_it(tmp_path: Path) -> None:
    gate, down, up = experts(0)
    model = read_index(split(tmp_path, [[*DENSE, gate], [down], [up, *experts(1)]]))
    assert model.shards == tuple(shard_path(tmp_path, number, 3) for number in (1, 2, 3))
    assert [tensor.shard for tensor in model.layers[0].tensors] == [1, 0, 2]
    assert [tensor.shard for tensor in model.layers[1].tensors] == [2, 2, 2]
    for layer in model.layers:
        for tensor in layer.tensors:
            span = tensor.span(tensor.n_expert - 1)
            assert span.offset + span.size_bytes <= model.shards[tensor.shard].stat().st_size


def test_a_first_shard_without_tensors_is_fine(tmp_path: Path) -> None:
    model = read_index(split(tmp_path, [[], [*DENSE, *experts(0)]]))
    assert {tensor.shard for tensor in model.layers[0].tensors} == {1}


def test_a_split_into_one_keeps_its_name(tmp_path: Path) -> None:
    path = moe(tmp_path / "any-name.gguf", split__no=0, split__count=1)
    assert read_index(path).shards == (path,)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    path = split(tmp_path, [DENSE, experts(0), experts(1)])
    shard_path(tmp_path, 2, 3).unlink()
    message = refusal(path, MissingShardError)
    assert "m-00002-of-00003.gguf' is missing, shard 2 of 3" in message


def test_a_later_shard_is_refused_with_the_first_one_named(tmp_path: Path) -> None:
    split(tmp_path, [DENSE, experts(0)])
    message = refusal(shard_path(tmp_path, 2, 2), ModelError)
    assert "is shard 2 of 2; give the first" in message
    assert "m-00001-of-00002.gguf" in message


def test_a_renamed_shard_is_refused(tmp_path: Path) -> None:
    path = split(tmp_path, [DENSE, experts(0)]).rename(tmp_path / "other.gguf")
    assert "rename it so that it ends in -00001-of-00002.gguf" in refusal(path, ModelFormatError)


@pytest.mark.parametrize(
    ("key", "value"), [("split.no", 0), ("split.count", 3), ("split.tensors.count", 99)]
)
def test_shards_that_disagree_are_refused(tmp_path: Path, key: str, value: int) -> None:
    path = split(tmp_path, [DENSE, experts(0)])
    fields: dict[str, Value] = {"split.no": 1, "split.count": 2, key: value}
    write(shard_path(tmp_path, 2, 2), fields, experts(0))
    message = refusal(path, ModelFormatError)
    assert f"its {key} is {value}" in message
    assert "m-00002-of-00002.gguf" in message


def test_a_later_shard_without_its_number_is_refused(tmp_path: Path) -> None:
    path = split(tmp_path, [DENSE, experts(0)])
    write(shard_path(tmp_path, 2, 2), {}, experts(0))
    assert "split.no is None" in refusal(path, ModelFormatError)


def test_shards_with_too_few_tensors_are_refused(tmp_path: Path) -> None:
    path = split(tmp_path, [DENSE, experts(0)], split__tensors__count=6)
    assert "announces 6 tensors, its shards have 5" in refusal(path, ModelFormatError)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    path = split(tmp_path, [experts(0), experts(0)])
    with pytest.raises(ModelFormatError, match=r"'blk\.0\.ffn_gate_exps\.weight' occurs twice"):
        read_index(path)


def test_a_first_shard_that_lacks_a_key_is_refused(tmp_path: Path) -> None:
    for key in ("general.architecture", "qwen3moe.block_count"):
        fields = {**moe_fields(), "split.no": 0, "split.count": 2}
        del fields[key]
        write(tmp_path / "m.gguf", fields, [*DENSE, *experts(0), *experts(1)])
        with pytest.raises(ModelFormatError, match=rf"key {key} is missing"):
            read_first_shard(tmp_path / "m.gguf")


# --- what is refused ---------------------------------------------------------------------------


def test_one_tensor_per_expert_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", moe_fields(), [Raw("blk.0.ffn_gate.3.weight", (64, 32))])
    message = refusal(path, ModelUnsupportedError)
    assert "'blk.0.ffn_gate.3.weight' is the tensor of one expert" in message


@pytest.mark.parametrize(
    "key", ["block_count", "expert_count", "expert_used_count", "embedding_length"]
)
def test_a_missing_key_of_a_moe_model_is_named(tmp_path: Path, key: str) -> None:
    fields = moe_fields()
    del fields[f"qwen3moe.{key}"]
    path = write(tmp_path / "m.gguf", fields, experts(0))
    assert f"key qwen3moe.{key} is missing" in refusal(path, ModelFormatError)


def test_an_architecture_on_two_lines_is_refused_on_one(tmp_path: Path) -> None:
    fields = moe_fields() | {"general.architecture": "qwen3\nmoe"}
    path = write(tmp_path / "m.gguf", fields, experts(0))
    assert r"general.architecture is 'qwen3\nmoe'" in refusal(path, ModelFormatError)


def test_a_missing_architecture_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {}, DENSE)
    assert "general.architecture is missing" in refusal(path, ModelFormatError)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("expert_used_count", 9, "expert_used_count is 9 for layer 0, which has 8 experts"),
        ("expert_used_count", 0, "expert_used_count is 0 for layer 0"),
        ("expert_used_count", [2, 2, 2], "not an array of 2 numbers"),
        ("expert_used_count", "two", "not a number from 0"),
        ("attention.head_count", [4], "not an array of 2 numbers"),
        ("block_count", 0, "1 to 512 layers are possible"),
        ("block_count", 2**32 - 1, "1 to 512 layers are possible"),
        ("nextn_predict_layers", 3, "1 to 512 layers are possible"),
    ],
)
def test_a_key_that_cannot_be_is_named(tmp_path: Path, key: str, value: Value, what: str) -> None:
    path = write(tmp_path / "m.gguf", moe_fields() | {f"qwen3moe.{key}": value}, experts(0))
    assert what in refusal(path, ModelFormatError)


@pytest.mark.parametrize("key", ["context_length", "attention.head_count_kv"])
def test_a_number_that_no_count_can_have_is_refused(tmp_path: Path, key: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    writer.add_uint32("qwen3moe.block_count", 2)
    if key == "context_length":
        writer.add_uint64(f"qwen3moe.{key}", 2**32)
    else:
        writer.add_array(f"qwen3moe.{key}", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert f"key qwen3moe.{key} is not" in refusal(tmp_path / "m.gguf", ModelFormatError)


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        ([Raw("blk.0.ffn_up_exps.weight", (64, 32))], "has shape [64, 32]"),
        ([Raw("blk.0.ffn_up_exps.weight", (64, 32, 0))], "has shape [64, 32, 0]"),
        ([Raw("blk.0.ffn_up_exps.weight", (1, 1, 1, 1, 1))], "has 5 dimensions"),
        ([Raw("blk.0.ffn_up_exps.weight", (1, 1, 1025))], "has 1025 experts; 1 to 1024"),
        ([Raw("blk.0.ffn_up_exps.weight", (48, 32, 8), Q4_0)], "has rows of 48"),
        ([experts(0)[0], experts(0, n_expert=4)[1]], "of layer 0 have [4, 8] experts"),
    ],
)
def test_tensors_that_cannot_be_are_named(tmp_path: Path, tensors: list[Raw], what: str) -> None:
    path = write(tmp_path / "m.gguf", moe_fields(), tensors)
    assert what in refusal(path, ModelFormatError)
