"""Slots that are given back while memory is short, or when a signal asks."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from servers import Server, serve

from longhaul import watch
from longhaul.arguments import read_arguments
from longhaul.budget import GIB, MIB, MemoryLimit, slots_bytes
from longhaul.cgroups import Cgroup
from longhaul.config import Config
from longhaul.errors import ConfigError
from longhaul.index import read_index
from longhaul.launch import RunPlan, plan_run, tool_sizes
from longhaul.pools import CPU, DeviceMemory, Placement
from longhaul.watch import GIVE_BACK, TAKE_AGAIN, Watcher, next_budget, slot_limits

FLOOR = 256 * MIB


@pytest.mark.parametrize(
    ("available_mib", "budget_mib", "wanted_mib"),
    [
        (256, 1000, 1000),
        (300, 1000, 1000),  # a little spare is left alone
        (300, 2000, 2000),
        (156, 1000, 868),  # what is missing, and 32 more
        (0, 1000, 712),
        (0, 200, 100),  # never below the least
        (456, 1000, 1100),  # half of what is spare
        (9000, 1000, 2000),  # never above the most
    ],
)
def test_budget_follows_available_memory(
    available_mib: int, budget_mib: int, wanted_mib: int
) -> None:
    limit = MemoryLimit(16 * GIB, available_mib * MIB, "here")
    found = next_budget(limit, FLOOR, budget_mib * MIB, 100 * MIB, 2000 * MIB)
    assert found == wanted_mib * MIB


def test_budget_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever others take, it comes to rest, with the floor kept."""
    most = 2000 * MIB
    for others_mib in (0, 500, 900, 1500, 5000):
        budget, seen = most, []
        for _ in range(40):
            available = max(3000 * MIB - others_mib * MIB - budget, 0)
            limit = MemoryLimit(3 * GIB, available, "here")
            budget = next_budget(limit, FLOOR, budget, 100 * MIB, most)
            seen.append(budget)
        assert len(set(seen[-5:])) == 1
        assert 3000 * MIB - others_mib * MIB - budget >= FLOOR or budget == 100 * MIB


def test_slots_in_use_are_never_fewer_than_one_token_needs(tiny: Path) -> None:
    layers = read_index(tiny).layers
    whole = slots_bytes(layers, (5, 8, 1))
    assert slot_limits(layers, (5, 8, 1), 0) == (2, 2, 1)
    assert slot_limits(layers, (5, 8, 1), whole) == (5, 5, 1)
    assert slot_limits(layers, (5, 8, 1), 2**60) == (5, 8, 1)
    before = (0, 0, 0)
    for budget_bytes in range(0, 2 * whole, layers[0].expert_bytes // 3):
        limits = slot_limits(layers, (5, 8, 1), budget_bytes)
        assert all(a <= b for a, b in zip(before, limits, strict=True))
        before = limits


class FakeEngine:
    """Takes note of the limits."""

    def __init__(self, n_slots: Sequence[int]) -> None:
        self.n_slots = tuple(n_slots)
        self.limits: list[tuple[int, ...]] = []
        self.n_bytes = 4096  # given back each time

    def set_limits(self, limits: Sequence[int]) -> int:
        self.limits.append(tuple(limits))
        return self.n_bytes


Watched = tuple[Watcher, FakeEngine, list[str]]


@pytest.fixture
def watched(tiny: Path) -> Callable[..., Watched]:
    """Returns a watcher of 6 slots in each of 3 layers, its engine, and the lines that it says."""

    def make(*, automatic: bool) -> Watched:
        plan = plan_of(tiny, automatic=automatic)
        engine, lines = FakeEngine((6, 6, 6)), []
        return Watcher(engine, plan, lines.append), engine, lines  # type: ignore[arg-type]

    return make


def on_devices(plan: RunPlan, n_layers: int) -> RunPlan:
    """Return a plan whose last layers lie on a device."""
    card = DeviceMemory("CUDA0", "a card", False, GIB, GIB, 1, 1, 1)
    device_of = {
        tensor.name: CPU if index < len(plan.n_slots) - n_layers else "CUDA0"
        for index, layer in enumerate(plan.model.layers)
        for tensor in layer.tensors
    }
    host = replace(card, name=CPU, is_host=True)
    return replace(plan, placement=Placement((card,), host, device_of, 256))


def plan_of(path: Path, *, automatic: bool) -> RunPlan:
    model = read_index(path)
    sizes = tool_sizes("completion", read_arguments(["-m", str(path), "-c", "256"]), model)
    return plan_run(model, sizes, Config(cache_bytes=None if automatic else model.expert_bytes))


def test_signals_halve_what_is_in_use_and_take_it_again(
    watched: Callable[..., Watched],
) -> None:
    watcher, engine, lines = watched(automatic=False)
    assert watcher.timeout_s is None  # asleep until there is a signal
    watcher.step([GIVE_BACK])
    assert engine.limits == [(3, 3, 3)]
    assert watcher.timeout_s == watch.TICK_S
    watcher.step([])
    assert engine.limits[1:] == [(3, 3, 3)]  # what a prompt took is given back again
    watcher.step([GIVE_BACK, GIVE_BACK, GIVE_BACK])
    assert engine.limits[-1] == (2, 2, 2)
    watcher.step([TAKE_AGAIN])
    assert engine.limits[-1] == (6, 6, 6)
    assert watcher.timeout_s is None
    assert len(lines) == 3
    assert all(line.endswith(" in use, as the signal asked") for line in lines)


def test_memory_that_is_short_limits_an_automatic_cache_only(
    watched: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = MemoryLimit(GIB, 0, "a test")
    monkeypatch.setattr(watch, "memory_limit", lambda: limit)
    watcher, engine, lines = watched(automatic=False)
    watcher.step([])
    assert (engine.limits, lines) == ([], [])
    watcher, engine, lines = watched(automatic=True)
    assert watcher.timeout_s == watch.TICK_S
    watcher.step([])
    assert engine.limits == [(2, 2, 2)]
    assert lines[0].endswith("since 0.0 MiB are available (a test)")
    monkeypatch.setattr(watch, "memory_limit", lambda: MemoryLimit(GIB, 2**50, "a test"))
    watcher.step([])
    watcher.step([])
    assert engine.limits[1:] == [(6, 6, 6)]
    assert len(lines) == 2


def test_memory_that_cannot_be_told_is_asked_for_again(
    watched: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> MemoryLimit:
        raise ConfigError("cannot tell")

    watcher, engine, lines = watched(automatic=True)
    monkeypatch.setattr(watch, "memory_limit", lambda: MemoryLimit(GIB, 0, "a test"))
    watcher.step([])
    monkeypatch.setattr(watch, "memory_limit", fail)
    watcher.step([])
    watcher.step([])
    assert set(engine.limits) == {(2, 2, 2)}
    assert lines[1:] == ["warning cannot tell; it stays as it is"]
    monkeypatch.setattr(watch, "memory_limit", lambda: MemoryLimit(GIB, 2**50, "a test"))
    watcher.step([])
    assert engine.limits[-1] == (6, 6, 6)


def test_slots_on_devices_stay_when_ram_is_short(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "memory_limit", lambda: MemoryLimit(GIB, 0, "a test"))
    lines: list[str] = []
    plan, engine = on_devices(plan_of(tiny, automatic=True), 2), FakeEngine((6, 6, 6))
    watcher = Watcher(engine, plan, lines.append)  # type: ignore[arg-type]
    watcher.step([])
    assert engine.limits == [(2, 6, 6)]
    assert len(lines) == 1


def test_where_all_slots_are_on_devices_ram_is_not_watched(tiny: Path) -> None:
    lines: list[str] = []
    plan, engine = on_devices(plan_of(tiny, automatic=True), 3), FakeEngine((6, 6, 6))
    watcher = Watcher(engine, plan, lines.append)  # type: ignore[arg-type]
    assert watcher.timeout_s is None
    watcher.step([])
    assert lines == []
    watcher.step([GIVE_BACK])
    assert lines == ["warning no memory of slots can be given back: it is locked, or on a device"]


def test_slots_are_kept_where_no_memory_comes_back(watched: Callable[..., Watched]) -> None:
    watcher, engine, lines = watched(automatic=False)
    engine.n_bytes = 0
    watcher.step([GIVE_BACK])
    assert engine.limits == [(3, 3, 3), (6, 6, 6)]
    assert lines == ["warning no memory of slots can be given back: it is locked, or on a device"]
    watcher.step([GIVE_BACK])
    assert len(engine.limits) == 2
    assert watcher.timeout_s is None


@pytest.mark.parametrize("number", [GIVE_BACK, TAKE_AGAIN])
def test_signals_that_come_before_anything_streams_do_no_harm(number: int, tmp_path: Path) -> None:
    code = (
        "import os, longhaul.tool as t\n"
        "t.only_asks = lambda args: os.kill(os.getpid(), %d) or True\n"
        "t.native.require_libraries = t.run_tool = lambda *a, **k: 0\n"
        "print('end', t.run_command('cli', 'x', None, ['--version'], help_llama=False))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code % number], capture_output=True, text=True, check=True
    )
    assert done.stdout == "end 0\n"


# --- while a server runs --------------------------------------------------------------------------


def rss_bytes(server: Server) -> int:
    """Return what a server has resident."""
    found: int = server.state()["memory"]["rss_bytes"]
    return found


def wait_until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    """Say whether something became true in time."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if is_so():
            return True
        time.sleep(0.05)
    return is_so()


@pytest.mark.usefixtures("libraries")
def test_memory_follows_a_signal_within_a_second(small_demo: Path) -> None:
    with serve(small_demo, "--load-mode", "none", cache=("--longhaul-cache", "200MiB")) as server:
        wanted = server.complete("The sea", 24).json()["content"]
        assert len(wanted) > 20
        before = rss_bytes(server)
        server.running.send(GIVE_BACK)
        start = time.monotonic()
        assert wait_until(lambda: rss_bytes(server) < before - 90 * MIB, 5.0)
        assert time.monotonic() - start < 2.0  # a second, and some for a busy machine
        assert server.complete("The sea", 24, cache_prompt=False).json()["content"] == wanted
        assert wait_until(lambda: rss_bytes(server) < before - 90 * MIB, 2.0)
        server.running.send(TAKE_AGAIN)
        server.running.wait_for(
            "cache   .* of .* in use, as the signal asked\n(.*\n)*.*as the sig", err=True
        )
        assert server.complete("The sea", 24, cache_prompt=False).json()["content"] == wanted
        assert rss_bytes(server) > before - 20 * MIB
        server.running.terminate()
        assert server.running.end().code == 0


@pytest.mark.usefixtures("libraries")
def test_memory_follows_a_signal_in_a_long_prompt(small_demo: Path) -> None:
    """At the end of a ubatch, of which the prompt has many."""
    args = ("--load-mode", "none", "-ub", "32", "--parallel", "1")
    cache = ("--longhaul-cache", "200MiB")
    with serve(small_demo, *args, cache=cache) as server, ThreadPoolExecutor(1) as pool:
        prompt = "The sea is wide and the night is long. " * 120
        answer = pool.submit(server.complete, prompt, 1)
        assert wait_until(lambda: server.state()["prefill"]["n_ubatches"] > 1, 30)
        server.running.send(GIVE_BACK)
        server.running.wait_for("cache   .* in use, as the signal asked", err=True)
        n_told = server.state()["prefill"]["n_ubatches"]
        assert not answer.done()
        assert answer.result().status_code == 200
        assert n_told < server.state()["prefill"]["n_ubatches"]


HOG = "import sys; held = b'x' * int(sys.argv[1]); print('held', flush=True); sys.stdin.read()"


@pytest.mark.usefixtures("libraries")
def test_an_automatic_cache_makes_room_for_others(small_demo: Path, own_cgroup: Cgroup) -> None:
    own_cgroup.set_limit(900 * MIB)
    with serve(
        small_demo, "--load-mode", "none", "-ub", "64", cache=(), cgroup=own_cgroup
    ) as server:
        wanted = server.complete("The sea", 24).json()["content"]
        assert len(wanted) > 20
        before = rss_bytes(server)
        needed = 900 * MIB - own_cgroup.usage_bytes - FLOOR + 100 * MIB
        words = own_cgroup.within([sys.executable, "-c", HOG, str(needed)])
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as hog:
            assert hog.stdout
            assert hog.stdin
            assert hog.stdout.readline() == b"held\n"
            assert wait_until(lambda: rss_bytes(server) < before - 90 * MIB, 5.0)
            again = server.complete("The sea", 24, cache_prompt=False).json()
            assert again["content"] == wanted
            low = rss_bytes(server)
            assert low < before - 90 * MIB
            hog.stdin.close()
        server.running.wait_for("in use, since .*\n(.*\n)*.*in use, since .*", err=True)

        def is_back() -> bool:
            text = server.complete("The sea", 24, cache_prompt=False).json()["content"]
            assert text == wanted
            return rss_bytes(server) > (low + before) / 2

        assert wait_until(is_back, 15.0)
    assert own_cgroup.n_oom_kills == 0
