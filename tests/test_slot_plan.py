"""Slots by layer from a trace, and the file that says them."""

import json
from pathlib import Path

import numpy as np
import pytest
from traces import QWEN3, MemoryTrace, header_of, record_of

from longhaul.budget import slots_bytes
from longhaul.errors import BudgetError, ConfigError
from longhaul.replay import replay
from longhaul.slot_plan import (
    HeldOut,
    held_out,
    plan_of,
    propose_slots,
    read_slot_plan,
    uniform_slots,
    write_slot_plan,
)
from longhaul.trace import TraceHeader, TraceLayer
from longhaul.trace_files import open_trace
from longhaul.workload import Workload, load_workload


def uneven(n_tokens: int = 2000) -> Workload:
    """Layer 0 takes turns among 4 experts, layer 1 draws from all 16."""
    rng = np.random.default_rng(3)
    header = header_of(2, 16, 2, 100)
    return load_workload(
        MemoryTrace(
            header,
            [
                record_of(t, il, [rng.permutation(4 if il == 0 else 16)[:2].tolist()])
                for t in range(n_tokens)
                for il in (0, 1)
            ],
        )
    )


def test_slots_go_where_they_save_reads() -> None:
    workload = uneven()
    budget = 14 * 101
    assert uniform_slots(workload, budget) == (7, 7)
    assert propose_slots(workload, budget) == (4, 10)
    for half in held_out(workload, budget):
        assert half.n_tokens == 1000
        assert half.proposed_hit_rate > half.uniform_hit_rate
        assert half.saved > 0.2


@pytest.mark.parametrize("share", [0.06, 0.125, 0.25, 0.5, 0.9, 1.0])
def test_a_proposal_keeps_the_budget_and_spends_it(share: float) -> None:
    workload = load_workload(open_trace(QWEN3))
    shapes = [layer.shape.moe_layer() for layer in workload.layers]
    budget = int(share * sum(shape.total_bytes for shape in shapes))
    n_slots = propose_slots(workload, budget)
    used = slots_bytes(shapes, n_slots)
    assert budget - max(shape.expert_bytes for shape in shapes) < used <= budget
    pairs = list(zip(n_slots, shapes, strict=True))
    assert all(shape.n_expert_used <= n <= shape.n_expert for n, shape in pairs)
    found = replay(workload, n_slots, "lru").stats.decode
    uniform = replay(workload, uniform_slots(workload, budget), "lru").stats.decode
    assert 0 < found.read_bytes <= uniform.read_bytes  # on what it was made from


def test_layers_that_are_alike_get_alike() -> None:
    header = TraceHeader((TraceLayer(0, 16, 2),) * 3)
    rng = np.random.default_rng(5)
    tokens = [rng.permutation(16)[:2].tolist() for _ in range(300)]
    records = [record_of(t, il, [ids]) for t, ids in enumerate(tokens) for il in range(3)]
    workload = load_workload(MemoryTrace(header, records))
    assert propose_slots(workload, 24) == (8, 8, 8)
    assert propose_slots(workload, 25) == (9, 8, 8)


def test_less_than_a_token_needs_is_refused() -> None:
    with pytest.raises(BudgetError, match="below the experts of one token"):
        propose_slots(uneven(10), 300)


def test_a_trace_that_is_too_short_to_halve_is_refused() -> None:
    with pytest.raises(ConfigError, match="too short"):
        held_out(uneven(1), 2000)


def test_savings_are_a_share_of_the_reads_of_the_uniform_split() -> None:
    assert HeldOut("a", 1, 0.5, 0.6, 200, 150).saved == 0.25
    assert HeldOut("a", 1, 0.5, 0.4, 200, 220).saved == pytest.approx(-0.1)
    assert HeldOut("a", 1, 1.0, 1.0, 0, 0).saved == 0


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = plan_of(uneven(100), 14 * 101)
    assert made.layers == (0, 1)
    assert sum(made.n_slots) == 14
    path = tmp_path / "slots.json"
    write_slot_plan(made, path)
    assert read_slot_plan(path) == made
    values = json.loads(path.read_text())
    assert sorted(values) == ["budget_bytes", "fingerprint", "format", "layers", "model"]
    assert values["layers"][1] == {"layer": 1, "n_slots": made.n_slots[1]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no plan"),
        ("[]", "it is no object"),
        ('{"format": 2}', "format 2; only 1"),
        ('{"format": 1}', "layers is no array"),
        ('{"format": 1, "budget_bytes": 1, "layers": []}', "missing"),
        ('{"format": 1, "budget_bytes": 1, "layers": [{"layer": 1}]}', "n_slots None"),
        ('{"format": 1, "budget_bytes": 1, "layers": [{"layer": 0, "n_slots": 0}]}', "n_slots 0"),
        ('{"format": 1, "layers": [{"layer": 0, "n_slots": 1}]}', "budget_bytes None"),
        (
            '{"format": 1, "budget_bytes": 1, "layers":'
            ' [{"layer": 0, "n_slots": 1}, {"layer": 0, "n_slots": 1}]}',
            "named twice",
        ),
    ],
)
def test_a_file_that_is_no_plan_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "slots.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_slot_plan(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_slot_plan(tmp_path)
