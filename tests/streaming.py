"""Runs a model streamed and resident, and compares. For tests that need the libraries."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from longhaul import llama
from longhaul.config import Config
from longhaul.engine import Engine
from longhaul.index import read_index
from longhaul.stats import Stats
from longhaul.tier import TierSizes

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Run:
    """Logits of prompt and generated tokens, (n_tokens, n_vocab), and how they came about."""

    logits: Logits
    n_ubatch: int
    stats: Stats | None = None
    slot_bytes: int = 0
    repacked_bytes: int = 0


@dataclass(frozen=True)
class Placement:
    """Where a model's layers lie: the last n_layers on these devices, the others on the CPU."""

    devices: tuple[str, ...] = ()
    n_layers: int = 0
    split: tuple[float, ...] = ()
    overrides: tuple[tuple[str, str], ...] = ()  # tensor name pattern, buffer type


@dataclass(frozen=True)
class Recipe:
    """What to evaluate: a prompt of random tokens, then greedy ones."""

    n_prompt: int = 200
    n_greedy: int = 64
    n_ubatch: int = 512
    n_threads: int = 1
    repack: bool = False
    use_mmap: bool = True
    placement: Placement = Placement()


def load(path: Path, recipe: Recipe) -> llama.Model:
    """Load a model as the recipe says."""
    return llama.Model(
        path,
        repack=recipe.repack,
        use_mmap=recipe.use_mmap,
        n_gpu_layers=recipe.placement.n_layers,
        devices=recipe.placement.devices,
        tensor_split=recipe.placement.split,
        tensor_overrides=dict(recipe.placement.overrides),
    )


def evaluate(path: Path, recipe: Recipe) -> Run:
    """Evaluate with whatever streams now."""
    n_ctx = -(-(recipe.n_prompt + recipe.n_greedy) // 256) * 256
    with (
        load(path, recipe) as model,
        llama.Context(
            model,
            n_ctx=n_ctx,
            n_ubatch=recipe.n_ubatch,
            n_threads=recipe.n_threads,
            op_offload=not recipe.placement.devices,  # streamed experts stay where their slots are
        ) as context,
    ):
        prompt = np.random.default_rng(7).integers(0, model.n_vocab, recipe.n_prompt).tolist()
        logits = [context.decode(prompt)]
        for _ in range(recipe.n_greedy):
            logits.append(context.decode([int(logits[-1][-1].argmax())]))
        return Run(np.concatenate(logits), context.n_ubatch)


def stream(
    path: Path,
    n_slots: int,
    recipe: Recipe,
    config: Config | None = None,
    tier: TierSizes | None = None,
) -> Run:
    """Evaluate with n_slots slots in every layer."""
    model = read_index(path)
    slots = [n_slots] * len(model.layers)
    with Engine(model, slots, config or Config(), tier=tier) as engine:
        with load(path, recipe):
            slot_bytes, repacked_bytes, *_ = engine.slot_bytes()
        run = evaluate(path, recipe)
        engine.raise_kept()
        return Run(run.logits, run.n_ubatch, engine.stats(), slot_bytes, repacked_bytes)


def largest_difference(a: Logits, b: Logits) -> float:
    """Compare logits; raises AssertionError if they are empty, not finite or all the same."""
    assert a.shape == b.shape
    assert a.size > 0
    assert np.isfinite(a).all()
    assert np.ptp(a) > 0
    return float(np.abs(a - b).max())


def slot_counts(n_expert_used: int, n_expert: int) -> Sequence[int]:
    """Return the slots to try: 1, k - 1, k, k + 1, half and all."""
    k = n_expert_used
    return sorted({1, max(k - 1, 1), k, min(k + 1, n_expert), n_expert // 2, n_expert})
