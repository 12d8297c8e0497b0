"""longhaul doctor: what it finds, and that it finds what is wrong."""

import errno
import json
from pathlib import Path

import pytest
from commands import environment, run

from longhaul import doctor, machine
from longhaul.budget import GIB, MIB, MemoryLimit
from longhaul.doctor import Finding
from longhaul.errors import ConfigError, PatchError


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.subject: finding.state for finding in findings}


@pytest.mark.usefixtures("libraries")
def test_a_machine_that_works(chat_model: Path) -> None:
    result = run("longhaul", "doctor", chat_model)
    assert result.code == 0, result.out + result.err
    lines = result.out.splitlines()
    assert any(line.startswith("ok      libraries  build ") for line in lines)
    assert any(line.split()[:2] == ["ok", "backend"] and "CPU" in line for line in lines)
    assert any(" model  " in line for line in lines)
    assert "\x1b" not in result.out  # no colours where nobody sees them
    found = json.loads(run("longhaul", "doctor", chat_model, "--json").out)
    assert {"libraries", "bindings", "backend", "memory", "cores", "model"} <= {
        finding["subject"] for finding in found
    }
    assert {finding["state"] for finding in found} <= {"ok", "slow", "broken"}
    assert all(finding["advice"] for finding in found if finding["state"] != "ok")


def test_libraries_that_are_missing(tmp_path: Path) -> None:
    result = run("longhaul", "doctor", env=environment(LONGHAUL_LIB_DIR=str(tmp_path / "none")))
    assert result.code == 1
    assert "broken  libraries" in result.out
    assert "broken  backends" in result.out
    assert "make build" in result.out
    assert "Traceback" not in result.out + result.err


def test_a_model_that_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(50_000))
    finding = doctor.model_fits(path)
    assert finding.state == "broken"
    assert "m.gguf" in finding.found
    result = run("longhaul", "doctor", path)
    assert result.code == 1
    assert "broken  model" in result.out


def test_bindings_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.bindings().state == "ok"
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.1")
    finding = doctor.bindings()
    assert finding.state == "broken"
    assert finding.found == "llama-cpp-python 0.1 instead of 0.3.36"
    assert finding.advice == "pip install llama-cpp-python==0.3.36"


def test_libraries_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise PatchError("the native library is of build 1, this package needs 2")

    monkeypatch.setattr(doctor.native, "require_libraries", fail)
    finding = doctor.libraries()
    assert (finding.state, finding.advice) == ("broken", "make build")
    assert "of build 1" in finding.found


def test_every_limit_of_memory_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [MemoryLimit(16 * GIB, 8 * GIB, "RAM"), MemoryLimit(GIB, 100 * MIB, "a cgroup")]
    monkeypatch.setattr(doctor, "memory_limits", lambda: limits)
    found = list(doctor.memory())
    assert [finding.state for finding in found] == ["ok", "broken"]
    assert found[1].found == "0.1 of 1.0 GiB available (a cgroup)"

    def fail() -> list[MemoryLimit]:
        raise ConfigError("cannot tell")

    monkeypatch.setattr(doctor, "memory_limits", fail)
    (finding,) = doctor.memory()
    assert finding.state == "slow"


def test_pressure_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pressure").mkdir()
    text = "some avg10={} avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00"
    (tmp_path / "pressure" / "io").write_text(text.format("40.00"))
    (tmp_path / "pressure" / "memory").write_text(text.format("2.00"))
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (3.5, 0, 0))
    assert states(list(doctor.pressure(tmp_path))) == {"cores": "slow", "io": "slow"}
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (0.5, 0, 0))
    (tmp_path / "pressure" / "io").unlink()
    assert states(list(doctor.pressure(tmp_path))) == {"cores": "ok"}


def test_disks(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "leaves_page_cache_alone", lambda path: True)
    monkeypatch.setattr(machine, "disk_rate", lambda path: 900.0 * MIB)
    assert states(list(doctor.disk(chat_model))) == {"reads": "ok", "disk": "ok"}
    monkeypatch.setattr(machine, "disk_rate", lambda path: 90.0 * MIB)
    assert states(list(doctor.disk(chat_model))) == {"reads": "ok", "disk": "slow"}
    monkeypatch.setattr(machine, "leaves_page_cache_alone", lambda path: False)
    assert states(list(doctor.disk(chat_model))) == {"reads": "slow", "disk": "slow"}

    def refuse(path: Path) -> bool:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(machine, "leaves_page_cache_alone", refuse)
    (finding,) = doctor.disk(chat_model)
    assert finding.state == "slow"
    assert "no reads past the page cache" in finding.found


def test_limited_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda what: (2 * GIB, 2 * GIB))
    (finding,) = doctor.address_space()
    assert finding.state == "slow"
    assert "2.0 GiB" in finding.found
