"""What all figures share: size, colours, how they are written, and axes over rounds.

Colours are those of Okabe and Ito (Color Universal Design, 2008) for rules and models, and Paul Tol's "muted" ones for
classes: people who confuse red and green tell them apart. A rule has the same colour and line in every figure.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedssl.atomic_files import atomic_write, make_subfolder, write_text
from fedssl.errors import InputError
from fedssl.runs.run import strategy_of
from fedssl.text_table import to_csv
from fedssl.untrusted import sanitize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_LONGEST = 200  # signs of a text in a figure

SCREEN_FORMATS = ("png",)  # what a run draws at its end
PAPER_FORMATS = ("png", "pdf", "csv")  # what the command draws: for the screen, for print, and the numbers themselves

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
COLORS = (BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE)  # Okabe and Ito's, without yellow: too light for a line
MARKERS = "osD^vPX"  # of lines of one colour
MUTED = ("#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#BBBBBB")


class LineStyle(NamedTuple):
    """How the lines of a rule look."""

    color: str
    linestyle: str = "-"


# By the names of the choices in conf/strategy; others get one by `line_style`.
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
    """The look of a rule, the same everywhere; of an unknown one dotted, in a colour that its name gives."""
    known = STRATEGY_STYLES.get(strategy)
    return known or LineStyle(COLORS[hashlib.sha256(strategy.encode()).digest()[0] % len(COLORS)], ":")


def strategy_color(folder: Path) -> str:
    """The color of the strategy of a run folder."""
    return line_style(strategy_of(folder)).color


def class_colors(numbers: np.ndarray, *, classes: int) -> np.ndarray:
    """Give every number of a class a colour, ``(n, 4)``: distinct ones up to 10 classes, a scale beyond."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgba_array

    if classes <= len(MUTED):
        return np.asarray(to_rgba_array(MUTED)[numbers])
    return np.asarray(colormaps["viridis"](numbers / (classes - 1)))


class PlotData(NamedTuple):
    """A figure, and the numbers that it shows, under a header."""

    figure: "Figure"
    rows: Iterable[Sequence[object]]


def new_figure(*, height: float, width: float = 7.0) -> "Figure":
    """Make an empty figure of this size in inches."""
    # Not pyplot: it keeps figures and may look for a display. Imported here because it takes half a second.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(data: PlotData, folder: Path, name: str, *, formats: Sequence[str] = SCREEN_FORMATS) -> Path:
    """Write a figure to ``figures/<name>.png`` of a folder, and in the other formats beside it.

    Parameters
    ----------
    data : PlotData
        Its rows are for the format "csv".
    folder : Path
    name : str
    formats : sequence of {"png", "pdf", "csv"}

    Returns
    -------
    Path
        The PNG file.

    Raises
    ------
    InputError
        It cannot be written.
    """
    file = folder / "figures" / f"{name}.png"
    write_png(data.figure, file)
    try:
        if "pdf" in formats:
            _write(data.figure, file.with_suffix(".pdf"), format="pdf", metadata={"CreationDate": None})
        if "csv" in formats:
            write_text(file.with_suffix(".csv"), to_csv(data.rows))
    except OSError as error:
        raise _unwritable(file, error) from error
    return file


def write_png(figure: "Figure", file: Path, *, dpi: int = 150) -> None:
    """Write the figure, whole or not at all; raises `InputError` if it cannot be written."""
    sanitize_texts(figure)
    try:
        make_subfolder(file.parent.parent, file.parent.name)
        _write(figure, file, dpi=dpi, format="png")
    except OSError as error:
        raise _unwritable(file, error) from error


def sanitize_texts(figure: "Figure") -> None:
    """Make all texts of a figure, some of which may be words of others, plain, printable and not too long."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(sanitize(text.get_text(), lines=True)[:_LONGEST])
        text.set_parse_math(False)


def _write(figure: "Figure", file: Path, **how: Any) -> None:
    from matplotlib import rc_context

    with rc_context({"pdf.fonttype": 42}):  # letters as TrueType, which journals ask for
        atomic_write(file, lambda stream: figure.savefig(stream, **how))


def _unwritable(file: Path, error: OSError) -> InputError:
    return InputError(
        f"the figure {file} cannot be written ({error.strerror}); make its folder a writable one, and remove what "
        "has its name"
    )


def axes_over_rounds(figure: "Figure", position: tuple[int, int, int], title: str) -> "Axes":
    """Add axes over rounds, with whole numbers on the horizontal one."""
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_subplot(*position, xlabel="round", ylabel=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return axes
