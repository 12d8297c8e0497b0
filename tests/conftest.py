"""Fixtures: models to stream, made once a session."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from arch_models import widen, write_arch_models
from chat_models import write_chat_model
from models import write_tiny_moe

from longhaul import demo
from longhaul.cgroups import Cgroup, make_cgroup
from longhaul.errors import LonghaulError, PatchError
from longhaul.library import lib_dir

# Waiting threads sleep: spinning ones starve each other when anything else runs. OpenMP reads this
# when it is loaded, which the import of a test module does.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

CHECKOUT = Path(__file__).resolve().parent.parent
ARCHS = ["llama", "qwen3moe", "qwen35moe", "laguna", "gpt-oss", "deepseek2", "maple"]


@pytest.fixture(scope="session")
def libraries() -> Path:
    """The folder of the native libraries; without them the tests that need them are skipped."""
    try:
        folder = lib_dir()
    except PatchError as e:
        pytest.skip(str(e))
    from longhaul import llama

    llama.route_log()
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MoE of 3 layers x 8 experts, top-2, F32."""
    return write_tiny_moe(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def own_cgroup() -> Iterator[Cgroup]:
    """A memory cgroup of its own; skips where none can be made."""
    try:
        with make_cgroup() as made:
            yield made
    except OSError as e:
        pytest.skip(f"no memory cgroup can be made here: {e}")


def require_arch_binary() -> Path:
    """Return llama.cpp's test-llama-archs; skips where it is not built."""
    binary = Path(
        os.environ.get("LONGHAUL_TEST_ARCHS", CHECKOUT / "build/native/bin/test-llama-archs")
    )
    if not binary.exists():
        pytest.skip(f"{binary} is not built; `make test` builds it")
    return binary


@pytest.fixture(scope="session")
def every_narrow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """llama.cpp's own tiny MoE models by architecture: 2 experts, top-2."""
    return write_arch_models(tmp_path_factory.mktemp("archs"), require_arch_binary())


@pytest.fixture
def widened(every_narrow: dict[str, Path], tmp_path: Path) -> Callable[[str, int, int], Path]:
    """Returns a tiny model by architecture, n_expert and n_expert_used."""

    def get(arch: str, n_expert: int, n_expert_used: int) -> Path:
        out = tmp_path / f"{arch}-{n_expert}-{n_expert_used}.gguf"
        return widen(every_narrow[arch], out, n_expert, n_expert_used)

    return get


@pytest.fixture
def arch_model(widened: Callable[[str, int, int], Path]) -> Callable[[str], Path]:
    """Returns, by architecture, a tiny model of llama.cpp's own with 16 experts, top-3."""
    return lambda arch: widened(arch, 16, 3)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The dense model with real text that the demo model is made of."""
    try:
        return demo.ensure_source()
    except LonghaulError as e:
        pytest.skip(f"SmolLM2 cannot be had: {e}")


@pytest.fixture(scope="session")
def chat_model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MoE of 3 layers x 8 experts, top-2, that has words to say."""
    return write_chat_model(tmp_path_factory.mktemp("chat") / "chat.gguf", smollm2)


@pytest.fixture(scope="session")
def small_demo(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """SmolLM2 upcycled to 8 experts, top-2, with another block of each expert zeroed."""
    path = tmp_path_factory.mktemp("demo") / "smollm2-8x.gguf"
    demo.upcycle(smollm2, path, n_expert=8, n_expert_used=2, drop_blocks=True)
    yield path
    path.unlink()
