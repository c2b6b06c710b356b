"""Size, colors and files of all figures, and lines over rounds.

Colors are safe for color-blind readers: Okabe and Ito's (Color Universal Design, 2008) for strategies and models, and
Paul Tol's "muted" ones for classes. A strategy has the same color and line style in every figure that compares
strategies.
"""

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedssl.atomic_files import atomic_write, make_subfolder, write_text
from fedssl.digests import identity
from fedssl.errors import InputError, sanitize
from fedssl.runs.run import strategy_of
from fedssl.text_table import to_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MAX_LENGTH = 200  # of a text in a figure
_OWN_FONT = "DejaVu Sans"  # which matplotlib comes with

SCREEN_FORMATS = ("png",)  # at the end of a run
PAPER_FORMATS = ("png", "pdf", "csv")  # of fedssl-report

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
COLORS = (BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE)  # Okabe and Ito's, without yellow: too light for a line
MARKERS = "osD^vPX"  # of lines of one color
MUTED = ("#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#BBBBBB")


class LineStyle(NamedTuple):
    """Line style of a strategy."""

    color: str
    linestyle: str = "-"


# By the choice in conf/strategy.
STRATEGY_STYLES = {
    "fedavg": LineStyle(BLACK),
    "l_dawa": LineStyle(VERMILLION),
    "fedu": LineStyle(BLUE),
    "eua": LineStyle(GREEN),
    "featarc": LineStyle(PURPLE),
    "m_dawa": LineStyle(ORANGE),
    "fedema": LineStyle(SKY),
    "fedprox": LineStyle(BLACK, "--"),
    "l_dawa_fedu": LineStyle(VERMILLION, "--"),
    "local_only": LineStyle(BLUE, "--"),
    "gossip": LineStyle(GREEN, "--"),
    "clustered": LineStyle(PURPLE, "--"),
    "loss_weighted": LineStyle(ORANGE, "--"),
    "fedbn": LineStyle(SKY, "--"),
    "median": LineStyle(BLACK, "-."),
    "per_ssl": LineStyle(BLUE, "-."),
    "krum": LineStyle(GREEN, "-."),
    "euc": LineStyle(ORANGE, "-."),
    "trimmed_mean": LineStyle(SKY, "-."),
}


def line_style(strategy: str) -> LineStyle:
    """Return the line style of a strategy: for an unknown one dotted, in a color derived from its name."""
    known = STRATEGY_STYLES.get(strategy)
    return known or LineStyle(COLORS[int(identity(strategy.encode())[:2], 16) % len(COLORS)], ":")


def nth_line_style(number: int) -> LineStyle:
    """Return the line style of one of several lines of the same strategy, counted from 0."""
    linestyles = ("-", "--", "-.", ":")
    return LineStyle(COLORS[number % len(COLORS)], linestyles[number // len(COLORS) % len(linestyles)])


def strategy_color(folder: Path) -> str:
    """Return the color of the strategy of a run folder."""
    return line_style(strategy_of(folder)).color


def class_colors(numbers: np.ndarray, *, classes: int) -> np.ndarray:
    """Return the colors of class numbers, ``(n, 4)``: distinct ones up to 10 classes, else a scale; gray below 0."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgba, to_rgba_array

    is_few = classes <= len(MUTED)
    colors = to_rgba_array(MUTED)[numbers] if is_few else colormaps["viridis"](numbers / (classes - 1))
    return np.where((numbers < 0)[:, None], to_rgba("lightgrey"), colors)


class PlotData(NamedTuple):
    """A figure and its numbers, with a header."""

    figure: "Figure"
    rows: Iterable[Sequence[object]]


def new_figure(*, height: float, width: float = 7.0) -> "Figure":
    """Return an empty figure of this size in inches."""
    # Not pyplot, which keeps figures and may need a display. Imported here because it takes half a second.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(data: PlotData, folder: Path, name: str, *, formats: Sequence[str] = SCREEN_FORMATS) -> Path:
    """Write a figure to ``figures/<name>.png`` and the other formats "pdf" and "csv", and return the PNG file."""
    file = folder / "figures" / f"{name}.png"
    with _writing(file):
        write_png(data.figure, file)
        if "pdf" in formats:
            _write(data.figure, file.with_suffix(".pdf"), format="pdf", metadata={"CreationDate": None})
        if "csv" in formats:
            write_text(file.with_suffix(".csv"), to_csv(data.rows))
    return file


def write_png(figure: "Figure", file: Path, *, dpi: int = 150) -> None:
    """Write a figure atomically; raise an `InputError` if it cannot be written."""
    sanitize_texts(figure)
    with _writing(file):
        make_subfolder(file.parent.parent, file.parent.name)
        _write(figure, file, dpi=dpi, format="png")


def sanitize_texts(figure: "Figure") -> None:
    """Make all texts of a figure printable and short, without formulas; some may be of other programs."""
    from matplotlib.text import Text

    texts = figure.findobj(Text)
    for text in texts:
        text.set_text(sanitize(text.get_text(), lines=True)[:_MAX_LENGTH])
        text.set_parse_math(False)
    fonts = _fonts_with(frozenset("".join(text.get_text() for text in texts)))
    for text in texts if fonts else ():
        text.set_fontfamily([*text.get_fontfamily(), *fonts])


@cache
def _fonts_with(characters: frozenset[str]) -> list[str]:
    """Return installed fonts that have the characters which matplotlib's own lacks, such as Chinese ones."""
    from matplotlib.font_manager import findfont, fontManager, get_font

    fonts = {str(findfont(_OWN_FONT)): _OWN_FONT}
    fonts |= {font.fname: font.name for font in fontManager.ttflist if "LastResort" not in font.fname}  # boxes alone
    found, missing = list[str](), characters - {"\n"}
    for file, name in fonts.items():
        if not missing:
            break
        with suppress(OSError, RuntimeError):  # it was removed, or is damaged
            font = get_font(file)
            lacking = frozenset(character for character in missing if not font.get_char_index(ord(character)))
            found += [name] * (lacking != missing)
            missing = lacking
    return found[1:]


def _write(figure: "Figure", file: Path, **options: Any) -> None:
    from matplotlib import rc_context

    with rc_context({"pdf.fonttype": 42}):  # TrueType, as journals require
        atomic_write(file, lambda stream: figure.savefig(stream, **options))


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free disk space" if is_full else "make its folder writable, and remove anything of that name"
        raise InputError(f"the figure {file} cannot be written ({error.strerror}); {remedy}") from error


def axes_over_rounds(figure: "Figure", position: tuple[int, int, int], title: str) -> "Axes":
    """Add axes over rounds, with integer ticks."""
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_subplot(*position, xlabel="round", ylabel=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return axes


def plot_band(
    axes: "Axes", x: Sequence[Any], points: Sequence[Sequence[Any]], style: Mapping[str, Any], *, scale: float = 1
) -> None:
    """Plot means with a band of one standard deviation, ``(n, 2)``, times ``scale``; no band where it is None."""
    mean, std = scale * np.array(points, dtype=float).reshape(-1, 2).T
    axes.plot(x, mean, markersize=4, **style)
    if np.isfinite(std).any():
        axes.fill_between(x, mean - std, mean + std, color=style["color"], alpha=0.2, linewidth=0)


def by_round(lines: Iterable[Mapping[str, Any]], key: str) -> dict[int, list[float]]:
    """Return the values of a key that are not None by round, ascending."""
    values: dict[int, list[float]] = {}
    for line in lines:
        if line.get(key) is not None:
            values.setdefault(line["round"], []).append(line[key])
    return dict(sorted(values.items()))
