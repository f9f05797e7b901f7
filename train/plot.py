"""One picture of a run, or of several to compare, from their logs."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from prep.files import local_path, shown, write_whole
from train.logs import PLACE, WHICH, Run, read_run
from train.options import PlotConfig

if TYPE_CHECKING:  # an extra, imported when it draws
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = list[tuple[float, float]]

SIZE_INCHES: Final = (14.0, 10.0)
DPI: Final = 100
MAX_POINTS: Final = 2000
"""Of a curve: more are averaged in groups, for a line a pixel wide shows no more."""
MAX_DOTS: Final = 16
"""Points of a curve up to which each one is marked."""
MAX_NAME: Final = 60
"""Characters of a run's name in the legend."""
LEGEND_CHARACTERS: Final = 150
"""Characters side by side in the legend."""
CHINESE_FONTS: Final = ("Microsoft YaHei", "SimHei", "PingFang SC", "Noto Sans CJK SC")
"""Of Windows, macOS and Linux, for names of runs that matplotlib's own font cannot write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A column of log.csv, or of steps.csv as a thin line, and how it is drawn."""

    column: str
    label: str = ""
    line: str = "-"
    marker: str = "o"
    is_of_steps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Curves that share a vertical axis; those of steps come first, to lie below."""

    label: str
    curves: tuple[Curve, ...]
    starts_at_zero: bool = False


def _both(column: str) -> tuple[Curve, Curve]:
    return Curve(column=column, is_of_steps=True), Curve(column=column)


PANELS: Final = (
    Panel(
        label="loss",
        curves=(
            Curve(column="loss", label="train, steps", is_of_steps=True),
            Curve(column="train_loss", label="train", line="--", marker="s"),
            Curve(column="val_loss", label="val"),
        ),
    ),
    Panel(
        label="accuracy (%)",
        curves=(
            Curve(column="top5_pct", label="top-5", line="--", marker="s"),
            Curve(column="ema_top1_pct", label="top-1 of the EMA", line=":", marker="^"),
            Curve(column="top1_pct", label="top-1"),
        ),
    ),
    Panel(label="learning rate", curves=_both("lr"), starts_at_zero=True),
    Panel(label="throughput (img/s)", curves=_both("img_per_s"), starts_at_zero=True),
    Panel(label="data wait (%)", curves=_both("data_wait_pct"), starts_at_zero=True),
    Panel(label="GPU temperature (\N{DEGREE SIGN}C)", curves=_both("gpu_temp_c")),
    Panel(label="GPU clock (MHz)", curves=_both("gpu_clock_mhz")),
)


def plot(config: PlotConfig, say: Callable[[str], None]) -> Path:
    """Draw the logs of runs, also while they are being written.

    Args:
        config: Options.
        say: Takes the line that names the picture.

    Returns:
        The PNG.

    Raises:
        ValueError: matplotlib is missing, --out is no PNG, or a log cannot be read.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError('train plot needs matplotlib: pip install "shardlane[plot]"') from error
    folders = list(dict.fromkeys(local_path(folder) for folder in config.run))
    out = folders[0] / "plot.png" if config.out is None else local_path(config.out)
    if out.suffix.lower() != ".png":
        raise ValueError(f"--out must end in .png, got {str(config.out)!r}")
    runs = [read_run(folder) for folder in folders]
    out.parent.mkdir(parents=True, exist_ok=True)
    with _fonts_for_names():
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        draw(figure, runs, legend_names(folders))
        write_whole(out, lambda file: figure.savefig(file, format="png", dpi=DPI))
    say(f"written: {shown(out)}")
    return out


@contextmanager
def _fonts_for_names() -> Iterator[None]:
    """Let letters that the standard font lacks come from a Chinese one, where there is one."""
    from matplotlib import font_manager, rc_context

    there = {font.name for font in font_manager.fontManager.ttflist}
    fonts = ["DejaVu Sans", *(name for name in CHINESE_FONTS if name in there)]
    with rc_context({"font.family": fonts}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # drawn as a box then
        yield


def legend_names(folders: Sequence[Path]) -> list[str]:
    """Name runs by their folders, or by the whole path where several have the same name."""
    counts = Counter(folder.name for folder in folders)
    names = [f.name if f.name and counts[f.name] == 1 else shown(f) for f in folders]
    return [_legible(name) for name in names]


def _legible(name: str) -> str:
    """Shorten a long name; keep matplotlib from taking `$` for a formula and `_` for hidden."""
    name = name.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(name) > MAX_NAME:
        name = f"{name[: MAX_NAME // 2 - 2]}...{name[-MAX_NAME // 2 + 1 :]}"
    name = name.replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def draw(figure: Figure, runs: Sequence[Run], names: Sequence[str]) -> None:
    """Draw the panels that have values, two a row over the same epochs; a colour a run.

    Raises:
        ValueError: No panel has any.
    """
    from matplotlib import colormaps

    palette = colormaps["tab10" if len(runs) <= 10 else "tab20"]
    colors = [palette(number % palette.N) for number in range(len(runs))]
    panels = [panel for panel in PANELS if any(_points(r, c) for r in runs for c in panel.curves)]
    if not panels:
        raise ValueError(f"the logs hold no figure to draw; {WHICH}")
    axes_of = _grid(figure, len(panels))
    for panel, axes in zip(panels, axes_of, strict=True):
        _draw_panel(axes, panel, runs, colors)
    axes_of[0].set_xlim(left=0)
    figure.align_ylabels()
    figure.supxlabel("epochs (thin lines: steps.csv, thick lines: log.csv)")
    _name_runs(figure, names, colors)


def _grid(figure: Figure, num_panels: int) -> list[Axes]:
    """Give axes two a row, with the same epochs; of an odd number the first one fills its row."""
    num_rows = (num_panels + 1) // 2
    grid = figure.add_gridspec(num_rows, 2)
    cells = [grid[row, column] for row in range(num_rows) for column in range(2)]
    alone = num_panels % 2 == 1
    if alone:
        cells[:2] = [grid[0, :]]
    result: list[Axes] = []
    for number, cell in enumerate(cells):
        axes = figure.add_subplot(cell, sharex=result[0] if result else None)
        axes.tick_params(labelbottom=number >= num_panels - 2 or (alone and number == 0))
        result.append(axes)
    return result


def _points(run: Run, curve: Curve) -> Points:
    """Give the points of a curve that are numbers."""
    table = run.steps if curve.is_of_steps else run.epochs
    if curve.column not in table:
        return []
    points = zip(table[PLACE], table[curve.column], strict=True)
    return [(x, y) for x, y in points if math.isfinite(y)]


def thinned(points: Points) -> Points:
    """Average groups of neighbours, so that at most `MAX_POINTS` are left."""
    size = max(1, math.ceil(len(points) / MAX_POINTS))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups]


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[Run], colors: Sequence[Any]) -> None:
    for curve in panel.curves:
        _draw_curve(axes, curve, [thinned(_points(run, curve)) for run in runs], colors)
    axes.set_ylabel(panel.label)
    axes.grid(visible=True, alpha=0.3)
    if panel.starts_at_zero:
        axes.set_ylim(bottom=0)
    if any(curve.label for curve in panel.curves):  # above the panel, where it hides nothing
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)


def _draw_curve(axes: Axes, curve: Curve, lines: Sequence[Points], colors: Sequence[Any]) -> None:
    """Draw a curve of each run that has it, and once its grey pattern for the legend."""
    style: dict[str, Any] = {
        "linestyle": curve.line,
        "linewidth": 0.8 if curve.is_of_steps else 1.8,
        "markersize": 2 if curve.is_of_steps else 5,
    }
    markers = [curve.marker if 0 < len(points) <= MAX_DOTS else "" for points in lines]
    for points, marker, color in zip(lines, markers, colors, strict=True):
        x, y = [x for x, _ in points], [y for _, y in points]
        alpha = 0.5 if curve.is_of_steps else 1.0
        axes.plot(x, y, color=color, alpha=alpha, marker=marker, **style)
    if curve.label and any(lines):
        axes.plot([], [], color="0.25", label=curve.label, marker=max(markers), **style)


def _name_runs(figure: Figure, names: Sequence[str], colors: Sequence[Any]) -> None:
    from matplotlib.lines import Line2D

    figure.legend(
        handles=[Line2D([], [], color=color, linewidth=4) for color in colors],
        labels=list(names),
        loc="outside upper center",
        ncols=max(1, min(len(names), LEGEND_CHARACTERS // (10 + max(map(len, names))))),
    )
