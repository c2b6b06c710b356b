"""The command ``fedssl-views``: a page with random views of images, before a method trains on them.

    fedssl-views [key=value ...] [out=views.html] [images=6] [draws=3] [bands=3,2,1]

The other settings are those of ``fedssl``: data set, augmentation and method decide what the page shows. Every image
is drawn ``draws`` times. ``bands`` are the channels, from 1, that are red, green and blue, of images with many.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedssl.atomic_files import write_text
from fedssl.augmentation import Augmentation
from fedssl.augmentation.recipe import ViewOptions, ViewRecipe
from fedssl.config.commands import bands_of, check_output, number_of, run_with_overrides
from fedssl.config.literal import path_of
from fedssl.config.load import compose
from fedssl.config.overrides import check_single
from fedssl.config.settings import Settings
from fedssl.config.targets import normalize
from fedssl.datasets.base import ImageData, load_federated
from fedssl.datasets.raster import unit_values
from fedssl.errors import InputError
from fedssl.methods.base import build_method
from fedssl.pages import base64_of, render
from fedssl.seeding import numpy_generator, torch_generator
from fedssl.training_checks import check_views
from fedssl.views import View

USAGE = (
    "usage: fedssl-views [dataset=NAME] [dataset.path=PATH] [augmentation=NAME] [key=value ...]\n"
    "       [out=views.html] [images=6] [draws=3] [bands=RED,GREEN,BLUE]\n"
    "       writes a page with random views of images; the other settings are those of fedssl"
)
MAX_PICTURES = 2000  # of a page
_WIDTH = 128  # pixels on the screen of a view with the size of the images
_KEYS = ("out", "images", "draws", "bands")
MAX_PIXELS = 256  # height and width of a picture; larger ones are reduced
HIDDEN = 0.85  # opacity of the gray over patches that a mask hides
_GRAY = 0.5


@dataclass(frozen=True)
class Display:
    """How values in [0, 1] become pictures.

    ``bands`` are the channels of red, green and blue, or the only one, for gray. Values from ``low`` to ``high`` are
    shown from black to white.
    """

    bands: tuple[int, ...]
    low: float = 0.0
    high: float = 1.0

    @classmethod
    def of(cls, images: Tensor, bands: Sequence[int] | None) -> "Display":
        """Choose for images ``(n, channels, height, width)``: the first three bands unless they are given.

        The range of images with more than 8 bits is that of their values, without the lowest and highest percent.
        """
        channels = images.shape[1]
        chosen = tuple(bands or ((0,) if channels == 1 else (0, 1, min(2, channels - 1))))
        if images.dtype == torch.uint8:
            return cls(chosen)
        low, high = np.percentile(unit_values(images)[:, list(chosen)].numpy(), (1, 99))
        return cls(chosen, float(low), float(high)) if high > low else cls(chosen)

    @property
    def text(self) -> str:
        """Return what differs from a plain picture; empty if nothing does."""
        of_bands = f"red, green and blue are channels {', '.join(str(band + 1) for band in self.bands)}"
        shown = f"values of {self.low:.3g} to {self.high:.3g} (of 0 to 1) are shown from black to white"
        is_plain = self.bands in ((0,), (0, 1, 2))
        parts = [*([] if is_plain else [of_bands]), *([shown] if (self.low, self.high) != (0, 1) else [])]
        return "; ".join(parts)

    def png(self, values: Tensor) -> str:
        """Return an image ``(channels, height, width)`` with values in [0, 1]."""
        scaled = (values[list(self.bands)] - self.low) / (self.high - self.low)
        pixels = (scaled.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        picture = Image.fromarray(pixels[:, :, 0] if len(self.bands) == 1 else pixels)
        picture.thumbnail((MAX_PIXELS, MAX_PIXELS), Image.Resampling.BOX)
        return base64_of(lambda stream: picture.save(stream, format="png"))


def main() -> int:
    """Run the command, and return its exit status, see `run_command`."""
    return run_with_overrides("fedssl-views", USAGE, run)


def run(overrides: Sequence[str]) -> str:
    """Write the page for the overrides, and return the text to print."""
    own = {key: value for key, _, value in (word.partition("=") for word in overrides) if key in _KEYS}
    others = normalize([word for word in overrides if word.partition("=")[0] not in _KEYS])
    check_single(others)
    out = path_of(own.get("out", "views.html"))
    check_output("out", out, ".html", ".htm")
    images, draws = (
        int(number_of(key, own.get(key, default), 1, MAX_PICTURES))
        for key, default in (("images", "6"), ("draws", "3"))
    )
    settings = compose(others)
    augment = settings.training.augmentation.make(Augmentation)
    check_views(augment, build_method(settings.model))
    bands = bands_of(own["bands"], settings.data.channels) if "bands" in own else None
    if images * (1 + draws * len(augment.recipes)) > MAX_PICTURES:
        raise InputError(
            f"images={images} draws={draws} with {len(augment.recipes)} views give more than {MAX_PICTURES} pictures; "
            "lower images or draws"
        )
    image_data = load_federated(settings.data)
    write_text(out, page(image_data, augment, settings, count=images, draws=draws, bands=bands))
    shown = min(images, len(image_data.images))
    return f"written to {out}: {draws} x {len(augment.recipes)} views of {shown} images"


def page(
    image_data: ImageData,
    augment: Augmentation,
    settings: Settings,
    *,
    count: int,
    draws: int,
    bands: tuple[int, ...] | None,
) -> str:
    """Return the page of ``count`` random images, each with ``draws`` times its views."""
    total = len(image_data.images)
    rows = np.sort(numpy_generator(settings.seed, "images of a page").permutation(total)[:count])
    images = image_data.images[torch.from_numpy(rows)].cpu()
    display = Display.of(images, bands)
    generator = torch_generator(settings.seed, "views of a page")
    drawn = [augment(images, generator) for _ in range(draws)]
    patches = [recipe.mask.patch if recipe.mask else None for recipe in augment.recipes]
    values = [
        [view_values(view, augment, patch=patch) for view, patch in zip(views.views, patches, strict=True)]
        for views in drawn
    ]
    largest = max(augment.sizes)
    widths = [max(24, round(_WIDTH * size / largest)) for size in augment.sizes]
    shown = [
        {
            "name": name,
            "original": display.png(original),
            "draws": [
                [{"data": display.png(view[index]), "width": width} for view, width in zip(views, widths, strict=True)]
                for views in values
            ],
        }
        for index, (name, original) in enumerate(zip(_names(image_data, rows), unit_values(images), strict=True))
    ]
    return render(
        "augmented_views/page.html.j2",
        images=shown,
        width=_WIDTH,
        facts=_facts(image_data, settings, display),
        recipes=_recipes(augment),
        masked=any(patches),
    )


def _recipes(augment: Augmentation) -> list[tuple[str, str, str]]:
    """Return the numbers of equal views, their kind and their settings."""
    numbers: dict[tuple[str, str], list[str]] = {}
    for number, (recipe, size) in enumerate(zip(augment.recipes, augment.sizes, strict=True), start=1):
        numbers.setdefault(_describe(recipe, size), []).append(str(number))
    return [(", ".join(of), kind, settings) for (kind, settings), of in numbers.items()]


def _facts(image_data: ImageData, settings: Settings, display: Display) -> list[str]:
    total, channels, height, width = image_data.images.shape
    stored = f"{channels} channel(s), {str(image_data.images.dtype).removeprefix('torch.')}"
    facts = [
        f"{settings.data.name}: {total:,} images of the clients, {height}x{width} pixels, {stored}",
        f"augmentation for {settings.model.method.name}, seed {settings.seed}",
    ]
    return [*facts, *filter(None, [display.text]), *image_data.warnings]


def _describe(recipe: ViewRecipe, size: int) -> tuple[str, str]:
    """Return the kind of a view, and its settings that are on."""
    kind = f"{recipe.role}, {size}x{size} pixels" + (f", {recipe.mask.kind} mask" if recipe.mask else "")
    defaults = asdict(ViewOptions())
    on = {key: value for key, value in asdict(recipe.view).items() if value != defaults[key]}
    if recipe.mask is not None:
        on |= {f"mask.{key}": value for key, value in asdict(recipe.mask).items() if key != "kind"}
    return kind, ", ".join(
        f"{key}={list(value) if isinstance(value, tuple) else value}" for key, value in on.items()
    ) or "unchanged"


def _names(image_data: ImageData, rows: np.ndarray) -> list[str]:
    """Return the file of every image with its folder, or its number, and its class."""
    names = [f"image {row}" for row in rows]
    if image_data.origin is not None:
        index, places = image_data.origin
        order = np.argsort(places[rows])
        for position, place in zip(order, index.places(np.sort(places[rows])), strict=True):
            names[position] = "/".join(Path(place.name).parts[-2:]).lstrip("/")
    if image_data.labels is not None and image_data.classes:
        for position, label in enumerate(image_data.labels[torch.from_numpy(rows)].tolist()):
            names[position] += f" ({image_data.classes[label]})" if label >= 0 else ""
    return names


def view_values(view: View, augment: Augmentation, *, patch: int | None) -> Tensor:
    """Return the views of a batch as numbers in [0, 1]; patches of this size that are hidden are nearly gray."""
    values = augment.denormalize(view.images).clamp(0, 1)
    if view.mask is None or patch is None:
        return values
    side = values.shape[-1] // patch
    hidden = view.mask.hidden.view(-1, 1, side, side).repeat_interleave(patch, 2).repeat_interleave(patch, 3)
    return torch.where(hidden, values.lerp(torch.tensor(_GRAY), HIDDEN), values)
