"""A figure as vector graphics within a page: nothing in it leads out of the page, and no name in it meets another's."""

import io
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from fedssl.plots.style import sanitize_texts
from fedssl.untrusted import sanitize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUMBER = re.compile(r"\d+\.\d+")
_SPACES = re.compile(r"^\{.*\}")  # before a name: the place in which XML defines it
_LEFT_OUT = ("metadata", "style")


def inline(figure: "Figure", *, name: str, label: str, kind: str = "plain") -> str:
    """Write the figure as an element ``svg``, the same for the same figure, with its texts as text.

    Parameters
    ----------
    figure : Figure
        Its texts are made plain, and nothing of it is cut off at the axes any more, for what cuts refers by an address.
    name : str
        Of letters and digits, which no other figure of the page has.
    label : str
        What it shows, for those who cannot see it.
    kind : str
        The class of the element.
    """
    from matplotlib import rc_context

    sanitize_texts(figure)
    for artist in figure.findobj():
        artist.set_clip_on(False)
    stream = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(stream, format="svg", transparent=True)
    root = ElementTree.fromstring(stream.getvalue())
    _tidy(root, name)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {"class": kind, "role": "img", "aria-label": sanitize(label)}
    return ElementTree.tostring(root, encoding="unicode")


def _tidy(root: ElementTree.Element, name: str) -> None:
    """Drop what a page does not need, and put ``name`` before the names by which elements refer to each other."""
    for parent in list(root.iter()):
        for child in [child for child in parent if _SPACES.sub("", child.tag) in _LEFT_OUT]:
            parent.remove(child)
    for element in root.iter():
        element.tag = _SPACES.sub("", element.tag)
        element.attrib = {_SPACES.sub("", key): value for key, value in element.attrib.items()}
    referred = {element.attrib["href"] for element in root.iter() if "href" in element.attrib}
    for element in root.iter():
        if "#" + (own := element.attrib.pop("id", "")) in referred:
            element.attrib["id"] = f"{name}-{own}"
        if "href" in element.attrib:
            element.attrib["href"] = f"#{name}-{element.attrib['href'].removeprefix('#')}"
        if "d" in element.attrib:  # a hundredth of a point is finer than any screen
            element.attrib["d"] = " ".join(
                _NUMBER.sub(lambda found: f"{float(found[0]):.2f}", element.attrib["d"]).split()
            )
