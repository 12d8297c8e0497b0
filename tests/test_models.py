"""The models that other tests stand on are what they claim to be."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from models import (
    experts_in_two_shards,
    random_weights,
    split_gguf,
    truncate,
    write_tiny_dense,
    write_tiny_moe,
)

Type = GGMLQuantizationType
TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q5_1, Type.Q4_K, Type.Q6_K]


def tensors(*paths: Path) -> dict[str, Any]:
    return {tensor.name: tensor for path in paths for tensor in GGUFReader(path).tensors}


@pytest.mark.parametrize("kind", TYPES)
def test_random_weights_have_mean_zero_and_the_deviation_asked_for(kind: Type) -> None:
    data = random_weights(np.random.default_rng(0), (64, 512), 0.125, kind)
    weights = dequantize(data, kind)
    assert weights.shape == (64, 512)
    assert abs(float(weights.mean())) < 0.006
    assert float(weights.std()) == pytest.approx(0.125, rel=0.1)


def test_types_may_differ_by_tensor_and_layer(tmp_path: Path) -> None:
    types = {"*_exps.weight": Type.Q4_0, "*ffn_down*": Type.Q8_0, "blk.1.*_exps.*": Type.Q4_K}
    path = write_tiny_moe(tmp_path / "moe.gguf", n_embd=256, n_ff=256, types=types)
    found = {name: tensor.tensor_type for name, tensor in tensors(path).items()}
    assert found["blk.0.ffn_up_exps.weight"] is Type.Q4_0
    assert found["blk.0.ffn_down_exps.weight"] is Type.Q8_0
    assert found["blk.1.ffn_down_exps.weight"] is Type.Q4_K
    assert found["blk.1.ffn_gate_inp.weight"] is Type.F32


def test_dense_model_has_no_experts(tmp_path: Path) -> None:
    path = write_tiny_dense(tmp_path / "dense.gguf")
    assert "llama.expert_count" not in GGUFReader(path).fields
    assert not [name for name in tensors(path) if "exps" in name]


def test_shards_hold_every_tensor_once(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "moe.gguf", types={"*_exps.weight": Type.Q4_0})
    shards = split_gguf(path, 3)
    names = [f"moe-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    assert [shard.name for shard in shards] == names
    whole, parts = tensors(path), tensors(*shards)
    assert sum(len(GGUFReader(shard).tensors) for shard in shards) == len(whole)
    for name, tensor in whole.items():
        assert parts[name].tensor_type is tensor.tensor_type
        np.testing.assert_array_equal(parts[name].data, tensor.data)
    for number, shard in enumerate(shards):
        fields = GGUFReader(shard).fields
        assert fields["split.no"].contents() == number
        assert fields["split.count"].contents() == 3
        assert fields["split.tensors.count"].contents() == len(whole)
        assert ("general.architecture" in fields) == (number == 0)


def test_experts_of_one_layer_may_lie_in_two_shards(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "moe.gguf")
    first, second = split_gguf(path, experts_in_two_shards(path, 1))
    assert "blk.1.ffn_up_exps.weight" in tensors(first)
    assert "blk.1.ffn_down_exps.weight" in tensors(second)


def test_groups_that_leave_a_tensor_out_are_refused(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "moe.gguf")
    with pytest.raises(ValueError, match="do not hold each tensor"):
        split_gguf(path, [["output.weight"], []])


def test_split_model_is_written_without_the_whole_one(tmp_path: Path) -> None:
    first = write_tiny_moe(tmp_path / "moe.gguf", split=2)
    assert first.name == "moe-00001-of-00002.gguf"
    assert len(list(tmp_path.iterdir())) == 2


def test_truncate_cuts_to_a_size_or_by_a_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    truncate(path, -30)
    assert path.stat().st_size == 70
    truncate(path, 10)
    assert path.stat().st_size == 10
