"""Texts of figures: a font for characters that matplotlib's own lacks."""

from pathlib import Path

import pytest
from matplotlib.font_manager import findfont, get_font

from fedssl.plots.style import new_figure, write_png


@pytest.mark.filterwarnings("error")  # of a missing glyph
def test_characters_are_drawn_by_a_font_that_has_them(tmp_path: Path):
    own, other = (get_font(findfont(name)).get_charmap() for name in ("DejaVu Sans", "STIXGeneral"))
    rare = next(chr(code) for code in other if code not in own and chr(code).isprintable())
    figure = new_figure(height=1)
    figure.suptitle(f"a class named {rare}")
    write_png(figure, tmp_path / "figures" / "a.png")
