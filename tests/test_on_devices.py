"""Experts in the memory of devices: workers on this machine, or what LONGHAUL_TEST_DEVICE names.

Streamed logits equal those of the resident run on the same devices: largest difference 0.0.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from devices import DEVICE_VARIABLE, Line, devices, forget_workers, skips_rows, worker
from models import Type, split_gguf, write_tiny_moe
from streaming import Placement, Recipe, evaluate, largest_difference, stream

from longhaul import llama
from longhaul.index import read_index
from longhaul.stats import Stats
from longhaul.tier import TierSizes

pytestmark = pytest.mark.usefixtures("libraries")

DEVICE_ARCHS = ["llama", "qwen3moe", "gpt-oss", "deepseek2", "qwen35moe"]
ALL_LAYERS = 99
UBATCHES = {1: Recipe(12, 4, 1), 64: Recipe(140, 4, 64), 512: Recipe(520, 4, 512)}
FEW = Recipe(16, 3, 4)  # kernels of devices for few tokens take another way


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MoE whose rows are whole blocks: shaders of Vulkan read beyond shorter ones.

    Lavapipe, where that is the memory of the process, crashes then, streaming or not.
    """
    folder = tmp_path_factory.mktemp("small")
    return write_tiny_moe(folder / "small.gguf", n_embd=256, n_ff=256)


@pytest.fixture(scope="module")
def one_device(libraries: Path) -> Iterator[tuple[str, ...]]:
    with devices(1) as names:
        yield names


@pytest.fixture(scope="module")
def two_devices(libraries: Path) -> Iterator[tuple[str, ...]]:
    with devices(2) as names:
        yield names


@pytest.fixture(scope="module")
def other_worker(libraries: Path) -> Iterator[str]:
    """A device that computes all rows of a stage, as other backends than the CPU's do."""
    if DEVICE_VARIABLE in os.environ:
        pytest.skip(f"{DEVICE_VARIABLE} is set: no workers are started")
    with worker() as endpoint, Line(endpoint, hides_skipping=True) as line:
        (device,) = llama.add_rpc_server(line.endpoint)
        try:
            yield device.name
        finally:
            forget_workers()


def assert_exact(
    path: Path, recipe: Recipe, tier: tuple[int, int] = (0, 0), slots: tuple[int, ...] = ()
) -> Stats:
    """Compare with the resident run; return what the last number of slots has counted."""
    model = read_index(path)
    layer, n_layers = model.layers[0], len(model.layers)
    sizes = TierSizes(*((n,) * n_layers for n in tier))
    resident = evaluate(path, recipe)
    assert resident.n_ubatch == recipe.n_ubatch
    stats = Stats()
    for n_slots in slots or (1, layer.n_expert_used, layer.n_expert // 2, layer.n_expert):
        streamed = stream(path, n_slots, recipe, tier=sizes)
        assert streamed.n_ubatch == resident.n_ubatch
        assert streamed.stats is not None
        assert streamed.stats.total.read_bytes > 0
        assert largest_difference(streamed.logits, resident.logits) == 0.0, f"{n_slots} slots"
        stats = streamed.stats
    return stats


# --- the same logits ------------------------------------------------------------------------------


@pytest.mark.parametrize("n_ubatch", UBATCHES)
@pytest.mark.parametrize("arch", DEVICE_ARCHS)
def test_architecture_streams_exactly_into_a_device(
    arch: str, n_ubatch: int, arch_model: Callable[[str], Path], one_device: tuple[str, ...]
) -> None:
    placement = Placement(one_device, ALL_LAYERS)
    assert_exact(arch_model(arch), replace(UBATCHES[n_ubatch], placement=placement))


def test_few_tokens_stream_exactly_into_a_device(
    arch_model: Callable[[str], Path], one_device: tuple[str, ...]
) -> None:
    assert_exact(arch_model("gpt-oss"), replace(FEW, placement=Placement(one_device, ALL_LAYERS)))


def test_a_worker_says_whether_its_kernels_pass_over_rows(one_device: tuple[str, ...]) -> None:
    if DEVICE_VARIABLE in os.environ:
        pytest.skip(f"{DEVICE_VARIABLE} is set: no workers are started")
    here = [device.name for device in llama.devices() if not device.name.startswith("RPC")]
    assert skips_rows(one_device[0]) or here != ["CPU"]


@pytest.mark.parametrize("arch", DEVICE_ARCHS)
@pytest.mark.parametrize("recipe", [FEW, UBATCHES[64]], ids=["few", "many"])
def test_architecture_streams_exactly_where_all_rows_are_computed(
    arch: str, recipe: Recipe, arch_model: Callable[[str], Path], other_worker: str
) -> None:
    assert not skips_rows(other_worker)
    placement = Placement((other_worker,), ALL_LAYERS)
    assert_exact(arch_model(arch), replace(recipe, placement=placement))


def test_where_all_rows_are_computed_a_line_says_what_that_means(
    small: Path, other_worker: str, one_device: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    llama.route_log()
    for device, n_slots, is_said in (
        (other_worker, 4, True),
        (other_worker, 8, False),
        (one_device[0], 4, not skips_rows(one_device[0])),
    ):
        caplog.clear()
        placement = Placement((device,), ALL_LAYERS)
        assert stream(small, n_slots, replace(FEW, placement=placement)).logits.size > 0
        text = "computes all rows in each stage"
        assert any(text in message for message in caplog.messages) == is_said


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q6_K, Type.Q4_0], ids=lambda kind: kind.name)
def test_types_whose_kernels_go_by_the_rows_of_an_expert_stream_exactly(
    kind: Type, one_device: tuple[str, ...], tmp_path: Path
) -> None:
    """A row too many for an expert would take another kernel, which adds in another order."""
    path = write_tiny_moe(
        tmp_path / "m.gguf",
        n_embd=256,
        n_ff=256,
        n_expert=32,
        n_expert_used=8,
        types={"*_exps.*": kind},
    )
    placement = Placement(one_device, ALL_LAYERS)
    for n_ubatch in (32, 64):
        recipe = Recipe(140, 4, n_ubatch, placement=placement)
        assert_exact(path, recipe, slots=(8, 12, 16, 24))


@pytest.mark.parametrize("n_ubatch", UBATCHES)
def test_layers_on_two_devices_stream_exactly(
    n_ubatch: int, small: Path, two_devices: tuple[str, ...]
) -> None:
    placement = Placement(two_devices, ALL_LAYERS, split=(1, 1))
    assert_exact(small, replace(UBATCHES[n_ubatch], placement=placement))


@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_layers_on_the_cpu_and_on_a_device_stream_exactly(
    n_layers: int, small: Path, one_device: tuple[str, ...]
) -> None:
    placement = Placement(one_device, n_layers)
    assert_exact(small, replace(UBATCHES[64], placement=placement))


@pytest.mark.parametrize("n_layers", [0, ALL_LAYERS])
def test_experts_elsewhere_than_their_layer_stream_exactly(
    n_layers: int, small: Path, one_device: tuple[str, ...]
) -> None:
    """Layers on the device with the experts of one in ordinary memory."""
    placement = Placement(one_device, n_layers, overrides=((r"blk\.1\.ffn_.*_exps", "CPU"),))
    assert_exact(small, replace(UBATCHES[64], placement=placement))


@pytest.mark.parametrize("n_shards", [2, 4])
def test_split_model_streams_exactly_into_a_device(
    n_shards: int, small: Path, tmp_path: Path, one_device: tuple[str, ...]
) -> None:
    whole = tmp_path / "m.gguf"
    whole.write_bytes(small.read_bytes())
    placement = Placement(one_device, ALL_LAYERS)
    assert_exact(split_gguf(whole, n_shards)[0], replace(UBATCHES[64], placement=placement))


def test_slots_are_in_the_devices_memory(small: Path, one_device: tuple[str, ...]) -> None:
    recipe = replace(UBATCHES[1], repack=True, placement=Placement(one_device, ALL_LAYERS))
    run_on_device = stream(small, 4, recipe)
    assert run_on_device.slot_bytes > 0
    assert run_on_device.repacked_bytes == 0


# --- a tier of ordinary memory behind the slots ---------------------------------------------------


@pytest.mark.parametrize("n_ubatch", [1, 64])
@pytest.mark.parametrize("tier", [(1, 0), (3, 1), (6, 0), (16, 4), (16, 16)])
def test_experts_that_are_kept_in_memory_stream_exactly(
    tier: tuple[int, int],
    n_ubatch: int,
    arch_model: Callable[[str], Path],
    one_device: tuple[str, ...],
) -> None:
    """A tier smaller than the slots, larger, and of all experts; some of it page-locked."""
    recipe = replace(UBATCHES[n_ubatch], placement=Placement(one_device, ALL_LAYERS))
    path = arch_model("qwen3moe")
    model = read_index(path)
    n_slots = model.layers[0].n_expert_used + 1
    total = assert_exact(path, recipe, tier, (1, n_slots)).total
    assert 0 < total.n_tier_hits <= total.n_misses
    expert_bytes = model.layers[0].expert_bytes
    assert total.read_bytes == (total.n_misses - total.n_tier_hits) * expert_bytes
    if tier[0] == model.layers[0].n_expert:  # each was read once
        assert total.read_bytes <= model.expert_bytes


def test_a_tier_behind_the_cpus_slots_streams_exactly(arch_model: Callable[[str], Path]) -> None:
    """Nobody wants it, but who insists gets what is right; repacked slots as well."""
    path = arch_model("gpt-oss")
    for repack in (False, True):
        recipe = replace(UBATCHES[64], repack=repack)
        assert assert_exact(path, recipe, (8, 0), (1, 4)).total.n_tier_hits > 0


def test_real_text_streams_exactly_into_a_device(
    small_demo: Path, one_device: tuple[str, ...]
) -> None:
    """Experts that are equal but for a zeroed block each, so that a wrong one shows."""
    used = [device for device in llama.devices() if device.name in one_device]
    if any("llvmpipe" in device.description for device in used):
        pytest.skip("lavapipe crashes over rows of 576, also when nothing streams")
    recipe = Recipe(24, 2, 64, placement=Placement(one_device, ALL_LAYERS))
    assert_exact(small_demo, recipe, slots=(1, 3))
    assert assert_exact(small_demo, recipe, (4, 1), (3,)).total.n_tier_hits > 0
