"""Layouts of experts and ways to route: which the tiny models cover, and those they do not."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from models import copy_metadata, finish
from streaming import Recipe, evaluate, largest_difference, slot_counts, stream
from test_sweep import EVERY_ARCH

from longhaul.gguf_header import read_header
from longhaul.index import read_index

pytestmark = pytest.mark.usefixtures("libraries")

FUSED = {"cohere2moe", "deepseek2", "hy_v3", "mistral4", "qwen35moe", "qwen3next", "qwen4exp"}
WITH_ROUTER_BIAS = {
    *("afmoe", "bailingmoe2", "bailingmoe3", "deepseek2", "deepseek32", "deepseek4", "dots1"),
    *("dots3note", "ernie4_5-moe", "exaone-moe", "glm-dsa", "glm4moe", "glm5-next", "hy_v3"),
    *("hy_v4", "kimi-k3", "kimi-linear", "laguna", "lfm2moe", "mimo2", "minimax-m2"),
    *("minimax-m3", "mistral4"),
}
EXPERT_BIAS = {"gpt-oss"}

N_EXPERT, N_EXPERT_USED = 8, 3
RECIPE = Recipe(n_prompt=60, n_greedy=6)


def tensors_like(path: Path, pattern: str) -> list[str]:
    """Return names of tensors that are like this within a layer."""
    names = [tensor.name for tensor in read_header(path).tensors]
    return [name for name in names if re.fullmatch(r"blk\.\d+\." + pattern, name)]


@pytest.mark.parametrize(
    ("pattern", "archs"),
    [
        (r"ffn_gate_up_exps\.weight", FUSED),
        (r"ffn_down_exps\.bias", EXPERT_BIAS),
        (r"ffn_down_exps\.scale", set(EVERY_ARCH)),
        (r"ffn_gate_exps\.scale", set(EVERY_ARCH) - FUSED),
        (r"exp_probs_b(\.bias)?", WITH_ROUTER_BIAS),
    ],
)
def test_sweep_covers_layout(pattern: str, archs: set[str], every_narrow: dict[str, Path]) -> None:
    swept = set(EVERY_ARCH) & set(every_narrow)
    assert {arch for arch in swept if tensors_like(every_narrow[arch], pattern)} == archs


def test_scales_biases_and_router_biases_of_experts_differ(
    widened: Callable[[str, int, int], Path],
) -> None:
    for arch, pattern in (
        ("qwen35moe", r"ffn_down_exps\.scale"),
        ("qwen3moe", r"ffn_gate_exps\.scale"),
        ("gpt-oss", r"ffn_up_exps\.bias"),
        ("glm4moe", r"exp_probs_b\.bias"),
    ):
        path = widened(arch, N_EXPERT, N_EXPERT_USED)
        names = tensors_like(path, pattern)
        assert names
        for tensor in GGUFReader(path).tensors:
            if tensor.name in names:
                assert len(np.unique(tensor.data, axis=0)) == N_EXPERT


@pytest.mark.parametrize("arch", sorted(FUSED))
def test_fused_gate_and_up_experts_are_two_streamed_tensors(
    arch: str, every_narrow: dict[str, Path]
) -> None:
    for layer in read_index(every_narrow[arch]).layers:
        kinds = [tensor.name.split(".")[2] for tensor in layer.tensors]
        assert kinds == ["ffn_down_exps", "ffn_gate_up_exps"]


def rewrite(path: Path, out: Path, counts: Mapping[str, int], is_split: bool) -> Path:
    """Copy a model with other counts in its header, its fused experts split where asked."""
    reader = GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(out, arch)
    copy_metadata(reader, writer)
    for key, count in counts.items():
        writer.kv_data[0].pop(f"{arch}.{key}", None)
        writer.add_uint32(f"{arch}.{key}", count)
    for tensor in reader.tensors:
        data = np.ascontiguousarray(tensor.data)
        if is_split and "ffn_gate_up_exps.weight" in tensor.name:
            for half, rows in zip(("gate", "up"), np.split(data, 2, axis=1), strict=True):
                writer.add_tensor(tensor.name.replace("gate_up", half), rows)
        else:
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return out


def assert_exact(path: Path) -> None:
    resident = evaluate(path, RECIPE)
    for n_slots in slot_counts(N_EXPERT_USED, N_EXPERT):
        streamed = stream(path, n_slots, RECIPE)
        assert streamed.stats is not None
        assert streamed.stats.total.read_bytes > 0
        difference = largest_difference(streamed.logits, resident.logits)
        assert difference == 0.0, f"{n_slots} slots"


@pytest.mark.parametrize("arch", ["qwen35moe", "deepseek2"])
def test_split_gate_and_up_experts_of_an_architecture_that_fuses_them(
    arch: str, widened: Callable[[str, int, int], Path], tmp_path: Path
) -> None:
    fused = widened(arch, N_EXPERT, N_EXPERT_USED)
    path = rewrite(fused, tmp_path / "split.gguf", {}, is_split=True)
    assert {len(layer.tensors) for layer in read_index(path).layers} == {3}
    assert_exact(path)


@pytest.mark.parametrize("arch", ["deepseek2", "qwen3moe", "bailingmoe2"])
def test_experts_chosen_from_the_best_groups(
    arch: str, widened: Callable[[str, int, int], Path], tmp_path: Path
) -> None:
    plain = widened(arch, N_EXPERT, N_EXPERT_USED)
    groups = {"expert_group_count": 4, "expert_group_used_count": 2}
    path = rewrite(plain, tmp_path / "groups.gguf", groups, is_split=False)
    ungrouped = evaluate(plain, RECIPE).logits[: RECIPE.n_prompt]
    grouped = evaluate(path, RECIPE).logits[: RECIPE.n_prompt]
    assert largest_difference(grouped, ungrouped) > 0
    assert_exact(path)
