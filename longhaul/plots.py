"""Draws what traces and runs say, as PNG or whatever the name of the file asks for.

matplotlib is loaded by the functions that draw, since it is an extra.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB = 2**30
DPI = 120
COLOURS = ("#1f5fa8", "#d1691e", "#2c8a4b", "#8a4fa3", "#555555")
GREY = "#999999"


@contextmanager
def _figure(path: Path, width: float = 7.0, height: float = 4.2) -> Iterator["tuple[Figure, Axes]"]:
    """Give a figure with one pair of axes, and write it; raises ConfigError if that cannot be."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ConfigError("plots need matplotlib: pip install longhaul[plot]") from e
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    yield figure, axes
    try:
        figure.savefig(path)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be written: {e}") from e


def plot_hit_rates(
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]], title: str, path: Path
) -> None:
    """Draw hit rate against share of the experts with slots, both 0 to 1, a curve a policy.

    A curve named belady is drawn as the bound that it is.
    """
    with _figure(path) as (_, axes):
        for colour, (name, points) in zip(_colours(len(curves)), curves, strict=True):
            shares, rates = zip(*points, strict=True)
            is_bound = name == "belady"
            axes.plot(
                _percent(shares),
                _percent(rates),
                color=GREY if is_bound else colour,
                linestyle="--" if is_bound else "-",
                marker="o",
                ms=3.5,
                label="Belady's bound" if is_bound else name,
            )
        axes.set_xlabel("experts that have a slot, %")
        axes.set_ylabel("hit rate while decoding, %")
        axes.set_xlim(0, 102)
        axes.set_ylim(0, 102)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, loc="lower right")
        axes.set_title(title, loc="left", fontsize=10)


def plot_use(
    shares: Sequence[Sequence[float]], layers: Sequence[int], title: str, path: Path
) -> None:
    """Draw in what share of the ubatches each expert was used, 0 to 1; a row a layer."""
    most = max(len(row) for row in shares)
    grid: npt.NDArray[np.float64] = np.full((len(shares), most), np.nan)
    for i, row in enumerate(shares):
        grid[i, : len(row)] = _percent(row)
    with _figure(path, 8.5, 1.8 + 4.2 * min(1.0, len(shares) / 40)) as (figure, axes):
        image = axes.imshow(grid, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
        step = max(1, len(layers) // 12)
        axes.set_yticks(range(0, len(layers), step), [str(il) for il in layers[::step]])
        axes.set_xlabel("expert")
        axes.set_ylabel("layer")
        axes.spines[["top", "right"]].set_visible(True)
        figure.colorbar(image, ax=axes, label="tokens that use it, %", pad=0.01)
        axes.set_title(title, loc="left", fontsize=10)


def plot_reuse(curves: Sequence[Sequence[float]], title: str, path: Path) -> None:
    """Draw what share of uses came after at most so many other experts, 0 to 1; a curve a layer.

    A curve has an item for each distance from 0 on.
    """
    with _figure(path) as (_, axes):
        for i, curve in enumerate(curves):
            label = f"each of {len(curves)} layers" if i == 0 else None
            axes.plot(_percent(curve), color=COLOURS[0], alpha=0.2, lw=0.8, label=label)
        length = min(map(len, curves))
        mean = np.mean([curve[:length] for curve in curves], axis=0)
        axes.plot(100 * mean, color=COLOURS[1], lw=2, label="all of them")
        axes.set_xlabel("other experts of the layer used since the last use, at most")
        axes.set_ylabel("uses, %")
        axes.set_xlim(0, max(map(len, curves)) - 1)
        axes.set_ylim(0, 102)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, loc="lower right")
        axes.set_title(title, loc="left", fontsize=10)


def plot_time(
    parts: Sequence[tuple[str, Sequence[float]]], n_each: int, title: str, path: Path
) -> None:
    """Draw seconds per token, stacked by what they went into; an item is `n_each` tokens."""
    with _figure(path, 8.5) as (figure, axes):
        tokens = np.arange(len(parts[0][1])) * n_each
        bottom = np.zeros(len(tokens))
        for colour, (name, seconds) in zip(_colours(len(parts)), parts, strict=True):
            height = 1000 * np.asarray(seconds)
            axes.bar(
                tokens, height, n_each, bottom, align="edge", color=colour, label=name, linewidth=0
            )
            bottom += height
        axes.set_xlabel("token" + (f" (means of {n_each})" if n_each > 1 else ""))
        axes.set_ylabel("time per token, ms")
        axes.set_xlim(0, len(tokens) * n_each)
        axes.set_ylim(0, 1.15 * _typical_top(bottom))
        figure.legend(frameon=False, ncols=len(parts), loc="outside lower center")
        axes.set_title(title, loc="left", fontsize=10)


def plot_sweep(points: Sequence[tuple[int, float]], expert_bytes: int, path: Path) -> None:
    """Draw tokens per second against the size of the cache; `expert_bytes` is all experts."""
    with _figure(path) as (_, axes):
        sizes, rates = zip(*sorted(points), strict=True)
        axes.plot([size / GIB for size in sizes], rates, marker="o", ms=4, color=COLOURS[0])
        axes.set_xlabel(f"cache, GiB (all experts: {expert_bytes / GIB:.2f})")
        axes.set_ylabel("tokens per second while decoding")
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.1 * max(rates))
        axes.grid(alpha=0.25)


def _typical_top(heights: npt.NDArray[np.float64]) -> float:
    """Return the height that shows nearly all; single ones may stand out several times higher."""
    most, typical = float(np.max(heights)), float(np.quantile(heights, 0.98))
    return most if most < 3 * typical else typical


def _percent(shares: Sequence[float]) -> list[float]:
    return [100 * share for share in shares]


def _colours(n: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(n)]
