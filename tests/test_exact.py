"""Streamed logits equal those of the resident run of the same build: largest difference 0.0."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ARCHS
from models import Type, experts_in_two_shards, split_gguf, write_tiny_moe
from streaming import Recipe, Run, evaluate, largest_difference, slot_counts, stream

from longhaul.config import Config
from longhaul.index import read_index

pytestmark = pytest.mark.usefixtures("libraries")


SHRINK = Config(ubatch="shrink")


def assert_exact(path: Path, n_slots: int, recipe: Recipe, resident: Run) -> None:
    streamed = stream(path, n_slots, recipe)
    assert streamed.n_ubatch == resident.n_ubatch
    assert streamed.stats is not None
    assert streamed.stats.total.read_bytes > 0
    assert largest_difference(streamed.logits, resident.logits) == 0.0, f"{n_slots} slots"


def assert_exact_at_all_slot_counts(path: Path, recipe: Recipe) -> None:
    layer = read_index(path).layers[0]
    resident = evaluate(path, recipe)
    for n_slots in slot_counts(layer.n_expert_used, layer.n_expert):
        assert_exact(path, n_slots, recipe, resident)


@pytest.mark.parametrize("arch", ARCHS)
def test_architecture_streams_exactly(arch: str, arch_model: Callable[[str], Path]) -> None:
    assert_exact_at_all_slot_counts(arch_model(arch), Recipe())


@pytest.mark.parametrize("arch", ARCHS)
def test_architecture_streams_exactly_with_a_shrunk_ubatch(
    arch: str, arch_model: Callable[[str], Path]
) -> None:
    path = arch_model(arch)
    for n_slots, n_ubatch in ((3, 1), (8, 2), (16, 512)):
        recipe = Recipe()
        streamed = stream(path, n_slots, recipe, SHRINK)
        resident = evaluate(path, replace(recipe, n_ubatch=n_ubatch))
        assert streamed.n_ubatch == resident.n_ubatch
        assert largest_difference(streamed.logits, resident.logits) == 0.0, f"{n_slots} slots"


@pytest.mark.parametrize("n_ubatch", [1, 3, 64])
def test_ubatches_of_any_size_stream_exactly(n_ubatch: int, tiny: Path) -> None:
    assert_exact_at_all_slot_counts(tiny, Recipe(n_prompt=70, n_greedy=8, n_ubatch=n_ubatch))


def test_whole_prompt_in_one_slot_streams_exactly(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf", n_expert=64, n_expert_used=6, n_ff=32)
    recipe = Recipe(n_prompt=2048, n_greedy=2, n_ubatch=2048)
    assert_exact(path, 1, recipe, evaluate(path, recipe))


def test_real_text_model_with_distinct_experts_streams_exactly(small_demo: Path) -> None:
    assert_exact_at_all_slot_counts(small_demo, Recipe(n_threads=2))


@pytest.mark.parametrize(
    "kind",
    [
        Type.F16,
        Type.BF16,
        Type.Q8_0,
        Type.Q4_0,
        Type.Q4_1,
        Type.Q5_0,
        Type.Q5_1,
        Type.Q4_K,
        Type.Q6_K,
    ],
    ids=lambda kind: kind.name,
)
@pytest.mark.parametrize("repack", [False, True], ids=["raw", "repacked"])
def test_type_streams_exactly(kind: Type, repack: bool, tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf", n_embd=256, n_ff=256, types={"*_exps.*": kind})
    assert_exact_at_all_slot_counts(path, Recipe(n_prompt=40, n_greedy=8, repack=repack))


def test_repacked_slots_are_used_for_types_that_llama_cpp_repacks(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf", n_embd=256, n_ff=256, types={"*_exps.*": Type.Q4_0})
    recipe = Recipe(n_prompt=8, n_greedy=2, repack=True)
    run = stream(path, 2, recipe)
    if run.repacked_bytes == 0:
        pytest.skip("this processor has no repacked layout for Q4_0")
    assert run.repacked_bytes == run.slot_bytes


def test_one_repacked_slot_streams_exactly(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf", n_embd=256, n_ff=256, types={"*_exps.*": Type.Q4_0})
    recipe = Recipe(n_prompt=20, n_greedy=8, repack=True)
    assert_exact(path, 1, recipe, evaluate(path, recipe))


def test_layers_and_tensors_of_different_types_stream_side_by_side(tmp_path: Path) -> None:
    types = {
        "*_exps.*": Type.Q4_0,
        "blk.1.*_exps.*": Type.F16,
        "blk.2.ffn_down_exps.*": Type.Q6_K,
    }
    path = write_tiny_moe(tmp_path / "m.gguf", n_embd=256, n_ff=256, types=types)
    assert len({layer.expert_bytes for layer in read_index(path).layers}) == 3
    assert_exact_at_all_slot_counts(path, Recipe(n_prompt=40, n_greedy=8))


@pytest.mark.parametrize("n_shards", [2, 4])
def test_split_model_streams_exactly(n_shards: int, tiny: Path, tmp_path: Path) -> None:
    whole = tmp_path / "m.gguf"
    whole.write_bytes(tiny.read_bytes())
    shards = split_gguf(whole, n_shards)
    assert_exact_at_all_slot_counts(shards[0], Recipe(n_prompt=40, n_greedy=8))


def test_experts_of_one_layer_in_two_shards_stream_exactly(tiny: Path, tmp_path: Path) -> None:
    whole = tmp_path / "m.gguf"
    whole.write_bytes(tiny.read_bytes())
    first = split_gguf(whole, experts_in_two_shards(whole, 1))[0]
    assert len({tensor.shard for tensor in read_index(first).layers[1].tensors}) == 2
    assert_exact_at_all_slot_counts(first, Recipe(n_prompt=40, n_greedy=8))


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("n_io_threads", [1, 7])
def test_thread_counts_do_not_change_the_result(
    n_threads: int, n_io_threads: int, tiny: Path
) -> None:
    recipe = Recipe(n_prompt=24, n_greedy=4, n_threads=n_threads, n_ubatch=2)
    streamed = stream(tiny, 4, recipe, Config(n_io_threads=n_io_threads))
    assert largest_difference(streamed.logits, evaluate(tiny, recipe).logits) == 0.0


@pytest.mark.parametrize("n_threads", [2, 3, 5])
@pytest.mark.parametrize("n_slots", [2, 5, 8])
def test_threads_that_repack_together_do_not_change_the_result(
    n_threads: int, n_slots: int, tmp_path: Path
) -> None:
    """Slices of several parts and several reads, on more threads than there are cores."""
    path = write_tiny_moe(tmp_path / "m.gguf", n_embd=512, n_ff=1024, types={"*_exps.*": Type.Q4_0})
    recipe = Recipe(n_prompt=24, n_greedy=8, n_threads=n_threads, repack=True)
    run = stream(path, n_slots, recipe, Config(chunk_bytes=64 * 1024))
    assert largest_difference(run.logits, evaluate(path, recipe).logits) == 0.0
    counters = run.stats.total
    assert 0 < counters.read_s + counters.repack_s + counters.plan_s <= counters.wait_s
    assert (counters.repack_s > 0) == (run.repacked_bytes > 0)


@pytest.mark.parametrize("chunk_kib", [4, 8, 12, 20, 64])
@pytest.mark.parametrize("n_embd", [128, 512])
def test_pieces_that_are_repacked_by_themselves_do_not_change_the_result(
    n_embd: int, chunk_kib: int, tmp_path: Path
) -> None:
    """Groups of rows that are smaller than a read, of about its size, and larger."""
    path = write_tiny_moe(
        tmp_path / "m.gguf", n_embd=n_embd, n_ff=1024, types={"*_exps.*": Type.Q4_0}
    )
    recipe = Recipe(n_prompt=24, n_greedy=8, repack=True)
    run = stream(path, 3, recipe, Config(chunk_bytes=chunk_kib * 1024))
    assert run.stats.total.n_misses > 50
    assert largest_difference(run.logits, evaluate(path, recipe).logits) == 0.0


def test_without_mmap_the_result_is_the_same(tiny: Path) -> None:
    recipe = Recipe(n_prompt=24, n_greedy=4, n_ubatch=2, use_mmap=False)
    streamed = stream(tiny, 4, recipe)
    assert largest_difference(streamed.logits, evaluate(tiny, recipe).logits) == 0.0
