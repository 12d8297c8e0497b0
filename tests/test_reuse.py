from hypothesis import given
from hypothesis import strategies as st
from traces import OLMOE, decoded, header_of

from longhaul.replay import replay_layer
from longhaul.reuse import FIRST, hits_by_slots, reuse_distances
from longhaul.trace_files import open_trace
from longhaul.workload import load_workload


def test_distances_count_the_other_experts_used_since() -> None:
    layer = decoded(header_of(1, 8, 2), [[0, 1], [2, 3], [1, 0], [0, 4]]).layers[0]
    # after the first two tokens 3 was used last, then 2, 1, 0
    assert reuse_distances(layer) == [FIRST] * 4 + [2, 3, 0, FIRST]
    assert hits_by_slots(layer) == [0, 1, 1, 2, 3, 3, 3, 3, 3]


def test_hits_are_those_of_a_replay_at_every_size_on_recorded_routing() -> None:
    for layer in load_workload(open_trace(OLMOE)).layers[:4]:
        hits = hits_by_slots(layer)
        assert len(hits) == 65
        assert hits[64] > hits[8] > 0
        for n_slots in range(8, 65, 7):
            assert hits[n_slots] == replay_layer(layer, n_slots, "lru")[False].n_hits


@given(data=st.data())
def test_hits_are_those_of_a_replay_at_every_size(data: st.DataObject) -> None:
    token = st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True)
    tokens = data.draw(st.lists(token, min_size=1, max_size=30))
    layer = decoded(header_of(1, 8, 2), tokens).layers[0]
    hits = hits_by_slots(layer)
    wanted = [replay_layer(layer, n, "lru")[False].n_hits for n in range(2, 9)]
    assert hits[2:] == wanted
