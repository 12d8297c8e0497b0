import os
import subprocess
import sys
from pathlib import Path

import pytest

from longhaul.budget import GIB, MIB, MemoryLimit, memory_limit
from longhaul.cgroups import Cgroup
from longhaul.errors import ConfigError

V1_NO_LIMIT = 9223372036854771712


def fake_proc(folder: Path, cgroup: str | None, total_gib: int = 16, free_gib: int = 12) -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(
        f"MemTotal:       {total_gib * 2**20} kB\nMemFree:          100 kB\n"
        f"MemAvailable:   {free_gib * 2**20} kB\nHugePages_Total:       0\n"
    )
    if cgroup is not None:
        (folder / "self" / "cgroup").write_text(cgroup)
    return folder


def v2(folder: Path, limit: str, used_bytes: int = 0, cached: int = 0, high: str = "max") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.high").write_text(high + "\n")
    (folder / "memory.current").write_text(f"{used_bytes}\n")
    (folder / "memory.stat").write_text(
        f"anon 5\nactive_file {cached}\ninactive_file {cached}\nfile {10 * cached}\n"
    )


def v1(folder: Path, limit_bytes: int, used_bytes: int = 0, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit_bytes}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used_bytes}\n")
    (folder / "memory.stat").write_text(
        f"cache 7\ninactive_file 9\ntotal_inactive_file {cached}\ntotal_active_file {cached}\n"
    )


def test_memory_of_a_machine_without_cgroups(tmp_path: Path) -> None:
    limit = memory_limit(fake_proc(tmp_path / "proc", None), tmp_path / "cgroup")
    assert (limit.bytes, limit.available_bytes) == (16 * GIB, 12 * GIB)
    assert "MemAvailable" in limit.source


def test_v2_limit_counts_page_cache_as_free(tmp_path: Path) -> None:
    proc, root = fake_proc(tmp_path / "proc", "0::/a/b\n"), tmp_path / "cgroup"
    v2(root / "a" / "b", str(4 * GIB), used_bytes=3 * GIB, cached=GIB)
    (root / "cgroup.controllers").write_text("cpu memory\n")
    assert memory_limit(proc, root) == MemoryLimit(
        4 * GIB, 3 * GIB, str(root / "a" / "b" / "memory.max")
    )


def test_v2_limit_of_a_parent_counts(tmp_path: Path) -> None:
    proc, root = fake_proc(tmp_path / "proc", "0::/a/b\n"), tmp_path / "cgroup"
    v2(root / "a", str(2 * GIB), used_bytes=GIB)
    v2(root / "a" / "b", "max")
    (root / "cgroup.controllers").touch()
    limit = memory_limit(proc, root)
    assert (limit.bytes, limit.available_bytes) == (2 * GIB, GIB)
    assert limit.source == str(root / "a" / "memory.max")


def test_v2_high_counts_like_max(tmp_path: Path) -> None:
    proc, root = fake_proc(tmp_path / "proc", "0::/a\n"), tmp_path / "cgroup"
    v2(root / "a", "max", high=str(GIB))
    (root / "cgroup.controllers").touch()
    assert memory_limit(proc, root).source.endswith("memory.high")


def test_v2_without_any_limit_leaves_the_machine(tmp_path: Path) -> None:
    proc, root = fake_proc(tmp_path / "proc", "0::/a\n"), tmp_path / "cgroup"
    v2(root / "a", "max")
    (root / "cgroup.controllers").touch()
    assert memory_limit(proc, root).available_bytes == 12 * GIB


def test_more_used_than_the_limit_leaves_nothing(tmp_path: Path) -> None:
    proc, root = fake_proc(tmp_path / "proc", "0::/a\n"), tmp_path / "cgroup"
    v2(root / "a", str(GIB), used_bytes=2 * GIB)
    (root / "cgroup.controllers").touch()
    assert memory_limit(proc, root).available_bytes == 0


HYBRID = "9:name=systemd:/x\n4:memory:/a/b\n3:cpu,cpuacct:/c\n0::/x\n"


def test_v1_limit_in_a_hybrid_tree(tmp_path: Path) -> None:
    proc, root = fake_proc(tmp_path / "proc", HYBRID), tmp_path / "cgroup"
    v1(root / "memory", V1_NO_LIMIT)
    v1(root / "memory" / "a", 3 * GIB, used_bytes=2 * GIB, cached=GIB // 2)
    v1(root / "memory" / "a" / "b", V1_NO_LIMIT)
    (root / "unified" / "x").mkdir(parents=True)
    assert memory_limit(proc, root) == MemoryLimit(
        3 * GIB, 2 * GIB, str(root / "memory" / "a" / "memory.limit_in_bytes")
    )


def test_v1_number_for_no_limit_is_none(tmp_path: Path) -> None:
    proc, root = fake_proc(tmp_path / "proc", HYBRID), tmp_path / "cgroup"
    v1(root / "memory" / "a" / "b", V1_NO_LIMIT, used_bytes=20 * GIB)
    assert memory_limit(proc, root).available_bytes == 12 * GIB


@pytest.mark.parametrize("path", ["/docker/0123/sub", "/../../sub", "/docker/0123"])
def test_a_container_sees_the_lower_part_of_the_tree(tmp_path: Path, path: str) -> None:
    proc, root = fake_proc(tmp_path / "proc", f"4:memory:{path}\n"), tmp_path / "cgroup"
    v1(root / "memory", 2 * GIB)
    v1(root / "memory" / "sub", GIB)
    limit = memory_limit(proc, root)
    assert limit.bytes == (GIB if path.endswith("sub") else 2 * GIB)


def test_figures_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    proc, root = fake_proc(tmp_path / "proc", HYBRID), tmp_path / "cgroup"
    v1(root / "memory" / "a" / "b", GIB)
    (root / "memory" / "a" / "b" / "memory.usage_in_bytes").unlink()
    with pytest.raises(ConfigError, match=r"usage_in_bytes.*give the cache a size"):
        memory_limit(proc, root)
    (proc / "meminfo").write_text("MemTotal: 5 kB\n")
    with pytest.raises(ConfigError, match="MemAvailable"):
        memory_limit(proc, root)


def test_without_proc_part_of_physical_memory_counts(tmp_path: Path) -> None:
    limit = memory_limit(tmp_path / "none", tmp_path / "none")
    assert limit.bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert limit.available_bytes == int(0.75 * limit.bytes)
    assert limit.source == "75% of physical memory"


def test_this_machine_has_memory() -> None:
    limit = memory_limit()
    assert 0 < limit.available_bytes <= limit.bytes


def test_limit_of_a_real_cgroup(own_cgroup: Cgroup) -> None:
    own_cgroup.set_limit(300 * MIB)
    code = (
        "from longhaul.budget import memory_limit\n"
        "held = bytearray(100 << 20)\n"
        "limit = memory_limit()\n"
        "print(limit.bytes, limit.available_bytes, limit.source)\n"
    )
    root = Path(__file__).parent.parent
    words = own_cgroup.within([sys.executable, "-c", code])
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=root)
    size, available, source = done.stdout.split()
    assert int(size) == 300 * MIB
    assert 100 * MIB < int(available) < 200 * MIB
    assert source == str(own_cgroup.folder / own_cgroup.limit_name)
