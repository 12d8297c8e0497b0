"""Writes tiny LoRA adapters with random factors; knows no code of longhaul."""

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter
from models import finish


def write_lora(
    path: Path, model: Path, patterns: Sequence[str], *, rank: int = 4, seed: int = 5
) -> Path:
    """Write an adapter for the tensors of the F32 model whose names match; raises if none does.

    An expert tensor gets factors for each of its experts.
    """
    reader = GGUFReader(model)
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    rng = np.random.default_rng(seed)
    adapted = [t for t in reader.tensors if any(fnmatch(t.name, p) for p in patterns)]
    if not adapted:
        raise ValueError(f"{model} has no tensor like {', '.join(patterns)}")
    for tensor in adapted:
        *experts, n_out, n_in = tensor.data.shape
        for suffix, shape in (("lora_a", (rank, n_in)), ("lora_b", (n_out, rank))):
            values = rng.standard_normal((*experts, *shape)) * shape[-1] ** -0.5
            writer.add_tensor(f"{tensor.name}.{suffix}", values.astype(np.float32))
    finish(writer)
    return path
