"""Every type that llama.cpp's quantize makes of a tiny MoE streams exactly, repacked or not.

Types whose tables quantize takes long to make (1 to 15 s each) have random blocks instead; with
LONGHAUL_EXACT=full quantize makes these as well.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from models import K_BLOCKS, Array, Type, finish, write_tiny_moe
from streaming import Recipe, evaluate, largest_difference, stream

from longhaul.index import read_index

pytestmark = pytest.mark.usefixtures("libraries")

# As llama.cpp 0c1e570 lists them, without aliases and COPY, and the type of most experts.
MAKES = {
    "Q1_0": "Q1_0",
    "Q2_0": "Q2_0",
    "Q4_0": "Q4_0",
    "Q4_1": "Q4_1",
    "MXFP4_MOE": "MXFP4",
    "Q5_0": "Q5_0",
    "Q5_1": "Q5_1",
    "IQ2_XXS": "IQ2_XXS",
    "IQ2_XS": "IQ2_XS",
    "IQ2_S": "IQ2_XS",
    "IQ2_M": "IQ2_S",
    "IQ1_S": "IQ1_S",
    "IQ1_M": "IQ1_M",
    "TQ1_0": "TQ1_0",
    "TQ2_0": "TQ2_0",
    "Q2_K": "Q2_K",
    "Q2_K_S": "Q2_K",
    "IQ3_XXS": "IQ3_XXS",
    "IQ3_S": "IQ3_S",
    "IQ3_M": "IQ3_S",
    "IQ3_XS": "IQ3_S",
    "Q3_K_S": "Q3_K",
    "Q3_K_M": "Q3_K",
    "Q3_K_L": "Q3_K",
    "IQ4_NL": "IQ4_NL",
    "IQ4_XS": "IQ4_XS",
    "Q4_K_S": "Q4_K",
    "Q4_K_M": "Q4_K",
    "Q5_K_S": "Q5_K",
    "Q5_K_M": "Q5_K",
    "Q6_K": "Q6_K",
    "Q8_0": "Q8_0",
    "F16": "F16",
    "BF16": "BF16",
    "F32": "F32",
}
OTHER_WORDS = {"Q3_K", "Q4_K", "Q5_K", "COPY"}
SLOW_TYPES = {
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ2_M",
    "IQ3_XXS",
    "IQ3_XS",
    "IQ3_S",
    "IQ3_M",
}
FULL = os.environ.get("LONGHAUL_EXACT") == "full"

# Bytes of a block, and the deviation of its values where the scale is 1.
RANDOM_BLOCKS = {
    Type.IQ1_S: (50, 6),
    Type.IQ1_M: (56, 6),
    Type.IQ2_XXS: (66, 40),
    Type.IQ2_XS: (74, 40),
    Type.IQ2_S: (82, 40),
    Type.IQ3_XXS: (98, 120),
    Type.IQ3_S: (110, 128),
}

N_EXPERT, N_EXPERT_USED = 8, 2
RUN_QUANTIZE = (
    "import sys; from longhaul.native import run_tool; "
    "sys.exit(run_tool('quantize', 'llama-quantize', sys.argv[1:]))"
)


def quantize(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN_QUANTIZE, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True)


def write_imatrix(path: Path, model: Path) -> Path:
    """Write random importances of every input of every matrix, as llama-imatrix would."""
    writer = GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["random"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    rng = np.random.default_rng(3)
    for tensor in GGUFReader(model).tensors:
        n_matrices = tensor.data.shape[0] if tensor.data.ndim == 3 else 1
        sums = rng.uniform(0.5, 2, (n_matrices, tensor.data.shape[-1])).astype(np.float32)
        writer.add_tensor(tensor.name + ".in_sum2", sums)
        writer.add_tensor(tensor.name + ".counts", np.ones((n_matrices, 1), np.float32))
    finish(writer)
    return path


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MoE whose rows any type can hold, F32."""
    path = tmp_path_factory.mktemp("types") / "f32.gguf"
    return write_tiny_moe(
        path, n_expert=N_EXPERT, n_expert_used=N_EXPERT_USED, n_embd=256, n_ff=256
    )


@pytest.fixture(scope="session")
def imatrix(source: Path) -> Path:
    """Importances for the types that need them."""
    return write_imatrix(source.with_name("imatrix.gguf"), source)


@pytest.fixture
def quantized(source: Path, imatrix: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Returns the tiny MoE in one of quantize's types."""

    def get(ftype: str) -> Path:
        path = tmp_path / f"{ftype}.gguf"
        done = quantize("--imatrix", imatrix, source, path, ftype, "1")
        assert done.returncode == 0, done.stderr[-2000:]
        return path

    return get


def assert_exact(path: Path, recipe: Recipe) -> None:
    resident = evaluate(path, recipe)
    for n_slots in (1, N_EXPERT_USED, N_EXPERT // 2, N_EXPERT):
        streamed = stream(path, n_slots, recipe)
        assert streamed.stats is not None
        assert streamed.stats.total.read_bytes > 0
        difference = largest_difference(streamed.logits, resident.logits)
        assert difference == 0.0, f"{n_slots} slots"


def random_blocks(kind: Type, rng: np.random.Generator, n_blocks: int, std: float) -> Array:
    size, deviation = RANDOM_BLOCKS[kind]
    blocks = rng.integers(0, 256, (n_blocks, size), dtype=np.uint8)
    scale = int(np.float16(std / deviation).view(np.uint16))
    if kind is Type.IQ1_M:  # a nibble of the scale in each of the last four words
        for i in range(4):
            high = blocks[:, size - 7 + 2 * i]
            high[:] = high & 0x0F | (scale >> 4 * i & 0x0F) << 4
    else:
        blocks[:, 0], blocks[:, 1] = scale & 0xFF, scale >> 8
    return blocks


@pytest.mark.parametrize("ftype", [f for f in MAKES if FULL or f not in SLOW_TYPES])
def test_type_of_quantize_streams_exactly(ftype: str, quantized: Callable[[str], Path]) -> None:
    path = quantized(ftype)
    kinds = [tensor.type_name for layer in read_index(path).layers for tensor in layer.tensors]
    assert max(kinds, key=kinds.count) == MAKES[ftype]
    for repack in (False, True):
        assert_exact(path, Recipe(n_prompt=40, n_greedy=8, repack=repack))


@pytest.mark.parametrize("kind", RANDOM_BLOCKS, ids=lambda kind: kind.name)
def test_type_of_random_blocks_streams_exactly(
    kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(K_BLOCKS, kind, partial(random_blocks, kind))
    types = {"*_exps.*": kind}
    path = write_tiny_moe(tmp_path / "m.gguf", n_layer=2, n_embd=256, n_ff=256, types=types)
    for repack in (False, True):
        assert_exact(path, Recipe(n_prompt=40, n_greedy=8, repack=repack))


def test_slow_types_are_tested_as_random_blocks() -> None:
    assert {MAKES[ftype] for ftype in SLOW_TYPES} == {kind.name for kind in RANDOM_BLOCKS}


def test_no_type_of_quantize_is_forgotten() -> None:
    listed = re.findall(r"^ [ 0-9]{3} (?: or |    ) (\w+) *:", quantize("--help").stdout, re.M)
    assert set(listed) - OTHER_WORDS == set(MAKES)
