"""What all figures share: their size, how they are written, and axes over rounds."""

from pathlib import Path
from typing import TYPE_CHECKING

from fedssl.errors import InputError
from fedssl.files import inner_folder, write_whole
from fedssl.untrusted import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_LONGEST = 200  # signs of a text in a figure


def new_figure(*, height: float, width: float = 7.0) -> "Figure":
    """Make an empty figure of this size in inches."""
    # Not pyplot: it keeps figures and may look for a display. Imported here because it takes half a second.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", folder: Path, name: str) -> Path:
    """Write the figure to ``figures/<name>.png`` of the run folder; raises `InputError` if that cannot be."""
    file = folder / "figures" / f"{name}.png"
    write_png(figure, file)
    return file


def write_png(figure: "Figure", file: Path, *, dpi: int = 150) -> None:
    """Write the figure, whole or not at all; raises `InputError` if it cannot be written."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):  # some of them may be words of others
        text.set_text(printable(text.get_text(), lines=True)[:_LONGEST])
        text.set_parse_math(False)
    try:
        inner_folder(file.parent.parent, file.parent.name)
        write_whole(file, lambda stream: figure.savefig(stream, dpi=dpi, format="png"))
    except OSError as error:
        raise InputError(
            f"the figure {file} cannot be written ({error.strerror}); make its folder a writable one, and remove what "
            "has its name"
        ) from error


def axes_over_rounds(figure: "Figure", position: tuple[int, int, int], title: str) -> "Axes":
    """Add axes over rounds, with whole numbers on the horizontal one."""
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_subplot(*position, xlabel="round", ylabel=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return axes
