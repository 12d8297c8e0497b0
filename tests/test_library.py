"""What is set in the environment before the libraries are loaded."""

import pytest

from longhaul.library import FUSION_SWITCHES, exact_environment, openmp_environment


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)


def test_waiting_threads_sleep_soon() -> None:
    (name, value), *rest = openmp_environment().items()
    assert (name, rest) == ("GOMP_SPINCOUNT", [])
    assert 0 < int(value) < 300_000  # which is the default
    resident = openmp_environment(reads=False)
    assert int(value) < int(resident["GOMP_SPINCOUNT"]) < 300_000


@pytest.mark.parametrize(
    ("name", "value"), [("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "300000")]
)
def test_what_the_user_has_set_stays(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert openmp_environment() == {}


def test_devices_fuse_nothing_unless_the_user_has_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in FUSION_SWITCHES:
        monkeypatch.delenv(name, raising=False)
    assert exact_environment()["GGML_VK_DISABLE_FUSION"] == "1"
    monkeypatch.setenv("GGML_CUDA_DISABLE_FUSION", "0")
    assert "GGML_CUDA_DISABLE_FUSION" not in exact_environment()
    assert len(exact_environment()) == len(FUSION_SWITCHES) - 1
