"""Every MoE architecture that llama.cpp's own test writes: streamed equals resident, at any budget.

`make exact` takes more ubatch sizes, and 16 experts top-2 beside 8 top-3.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import require_arch_binary
from streaming import Recipe, evaluate, largest_difference, slot_counts, stream

from longhaul.index import read_index

pytestmark = pytest.mark.usefixtures("libraries")

FULL = os.environ.get("LONGHAUL_EXACT") == "full"
SHAPES = [(8, 3), (16, 2)] if FULL else [(8, 3)]
UBATCHES = [1, 3, 64, 512] if FULL else [3, 512]
N_PROMPT = 160 if FULL else 60
N_GREEDY = 24 if FULL else 6

# As of llama.cpp 0c1e570; refact has experts in its file, but its graph does not use them.
EVERY_ARCH = """
afmoe arctic bailingmoe bailingmoe2 bailingmoe3 cohere2moe dbrx deepseek deepseek2 deepseek32
deepseek4 dots1 dots3note ernie4_5-moe exaone-moe glm-dsa glm4moe glm5-next gpt-oss granite
granitemoe grok grovemoe hunyuan-moe hy_v3 hy_v4 kimi-k3 kimi-linear laguna lfm2moe llada-moe llama
llama4 maple mellum mimo2 minicpm minimax-01 minimax-m2 minimax-m3 mistral3 mistral4 olmoe phimoe
qwen2moe qwen35moe qwen3moe qwen3next qwen3vlmoe qwen4exp rnd1 smallthinker
""".split()

NON_CAUSAL = {"llada-moe", "rnd1"}  # diffusion: llama.cpp wants all tokens of a batch in one ubatch


@pytest.mark.parametrize(("n_expert", "n_expert_used"), SHAPES)
@pytest.mark.parametrize("arch", EVERY_ARCH)
def test_architecture_is_exact_at_every_budget(
    arch: str,
    n_expert: int,
    n_expert_used: int,
    widened: Callable[[str, int, int], Path],
) -> None:
    path = widened(arch, n_expert, n_expert_used)
    for n_ubatch in [512] if arch in NON_CAUSAL else UBATCHES:
        recipe = Recipe(n_prompt=N_PROMPT, n_greedy=N_GREEDY, n_ubatch=n_ubatch)
        resident = evaluate(path, recipe)
        for n_slots in slot_counts(n_expert_used, n_expert):
            streamed = stream(path, n_slots, recipe)
            assert streamed.n_ubatch == resident.n_ubatch
            assert streamed.stats is not None
            assert streamed.stats.total.read_bytes > 0
            if n_slots == n_expert:  # each expert once: all that is read stays
                assert streamed.stats.total.read_bytes <= read_index(path).expert_bytes
            difference = largest_difference(streamed.logits, resident.logits)
            assert difference == 0.0, f"{n_slots} slots, ubatch {n_ubatch}"


def test_no_architecture_is_forgotten(
    every_narrow: dict[str, Path],
) -> None:
    assert require_arch_binary().exists()
    with_experts = {arch for arch, path in every_narrow.items() if read_index(path).is_moe}
    assert with_experts - {"refact"} == set(EVERY_ARCH)
