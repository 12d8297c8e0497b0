"""Plots: what they say, in words and numbers; how they look is looked at."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from traces import OLMOE, decoded, header_of

from longhaul import plots
from longhaul.errors import ConfigError
from longhaul.replay import replay
from longhaul.trace_files import open_trace
from longhaul.trace_plots import plot_kind, plot_reuse, plot_run, plot_use
from longhaul.workload import load_workload


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """Every figure that is written."""
    figures: list[Figure] = []
    savefig = Figure.savefig

    def keep(self: Figure, *args: object, **kwargs: object) -> None:
        figures.append(self)
        savefig(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    yield figures


def axes_of(drawn: list[Figure], path: Path) -> Axes:
    """Return the axes of the one figure, which has labels with units, and is a PNG that shows."""
    (figure,) = drawn
    axes = figure.axes[0]
    assert axes.get_xlabel()
    assert axes.get_ylabel()
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width > 600
    assert height > 200
    return axes


def legend_of(axes: Axes) -> list[str]:
    legend = axes.get_legend() or axes.figure.legends[0]  # type: ignore[union-attr]
    return [text.get_text() for text in legend.get_texts()]


def test_budgets_have_a_curve_a_policy(drawn: list[Figure], tmp_path: Path) -> None:
    start, path = tmp_path / "start.jsonl", tmp_path / "out.png"
    start.write_text("".join(OLMOE.read_text().splitlines(keepends=True)[:60]))
    assert plot_kind("budget", start, path) == []
    axes = axes_of(drawn, path)
    assert legend_of(axes) == ["lru", "lfu", "slru", "pinned", "Belady's bound"]
    curves = {str(line.get_label()): line.get_xydata() for line in axes.get_lines()}
    rates = {round(x, 1): y for x, y in np.asarray(curves["lru"])}
    workload = load_workload(open_trace(start))
    for n_slots in (16, 32):
        wanted = replay(workload, [n_slots] * 16, "lru").stats.decode.hit_rate
        assert rates[100 * n_slots / 64] == pytest.approx(100 * wanted) != 0
    assert min(rates) == 12.5  # the experts of one token
    assert "%" in axes.get_xlabel()
    assert "%" in axes.get_ylabel()


def test_use_is_a_share_of_the_tokens(drawn: list[Figure], tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    plot_use(decoded(header_of(2, 4, 2), [[0, 1], [0, 2], [0, 1], [0, 1]]), path)
    axes = axes_of(drawn, path)
    grid = np.asarray(axes.get_images()[0].get_array())
    assert grid.tolist() == [[100, 75, 25, 0]] * 2
    assert drawn[0].axes[1].get_ylabel() == "tokens that use it, %"


def test_reuse_has_a_curve_a_layer_and_their_mean(drawn: list[Figure], tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    plot_reuse(decoded(header_of(2, 4, 2), [[0, 1], [2, 3], [1, 0], [0, 1]]), path)
    axes = axes_of(drawn, path)
    assert legend_of(axes) == ["each of 2 layers", "all of them"]
    assert len(axes.get_lines()) == 3
    mean = axes.get_lines()[-1].get_ydata()
    # of 8 uses 4 are first ones; the others come after 2, 3, 0 and 1 other experts
    assert np.asarray(mean).tolist() == [12.5, 25, 37.5, 50]


def ubatch(phase: str, n_tokens: int, scale: float = 1.0) -> dict[str, object]:
    return {
        "phase": phase,
        "n_tokens": n_tokens,
        "compute_s": 0.1 * scale,
        "wait_s": 0.06 * scale,
        "read_s": 0.04 * scale,
        "repack_s": 0.01 * scale,
        "plan_s": 0.002 * scale,
    }


def write_run(path: Path, *ubatches: dict[str, object]) -> Path:
    path.write_text(json.dumps({"model": "M", "ubatches": ubatches}))
    return path


def test_time_of_a_token_is_split_by_what_it_went_into(drawn: list[Figure], tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run.json", ubatch("prefill", 9, 50), ubatch("decode", 1), ubatch("decode", 2)
    )
    path = tmp_path / "out.png"
    assert plot_kind("time", run, path) == []
    axes = axes_of(drawn, path)
    assert legend_of(axes) == [
        "computing",
        "waiting for reads",
        "repacking",
        "planning",
        "other waiting",
    ]
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers]  # type: ignore[union-attr]
    wanted = [40, 40, 10, 2, 8]
    assert np.allclose(heights, [[ms, ms / 2] for ms in wanted])
    assert axes.get_ylabel() == "time per token, ms"
    assert axes.get_xlabel() == "token"


def test_many_tokens_are_drawn_as_means(drawn: list[Figure], tmp_path: Path) -> None:
    rows = [ubatch("decode", 1, 1 + i % 2) for i in range(600)]
    path = tmp_path / "out.png"
    plot_run(write_run(tmp_path / "run.json", *rows), path)
    axes = axes_of(drawn, path)
    assert axes.get_xlabel() == "token (means of 3)"
    assert len(axes.containers[0]) == 200
    assert axes.get_xlim() == (0, 600)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ubatch("prefill", 4), "has no decoded tokens"),
        ({"phase": "decode"}, "compute_s of a ubatch is None"),
        ({**ubatch("decode", 1), "read_s": -1}, "read_s of a ubatch is -1"),
        ({**ubatch("decode", 1), "wait_s": "long"}, "wait_s of a ubatch is 'long'"),
        ({**ubatch("decode", 1), "plan_s": float("nan")}, "plan_s of a ubatch is nan"),
    ],
)
def test_figures_that_cannot_be_drawn_are_refused(
    row: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        plot_run(write_run(tmp_path / "run.json", row), tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


def test_a_sweep_is_drawn_from_the_smallest_cache_on(drawn: list[Figure], tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    plots.plot_sweep([(2**31, 8.0), (2**29, 3.0), (2**30, 6.0)], 3 * 2**30, path)
    axes = axes_of(drawn, path)
    assert np.asarray(axes.get_lines()[0].get_xydata()).tolist() == [[0.5, 3], [1, 6], [2, 8]]
    assert axes.get_xlabel() == "cache, GiB (all experts: 3.00)"


def test_an_unknown_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"out\.doc cannot be written"):
        plots.plot_sweep([(1, 1.0)], 1, tmp_path / "out.doc")
