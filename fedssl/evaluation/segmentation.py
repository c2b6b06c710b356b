"""Linear segmentation: a 1x1 convolution on the frozen encoder's last feature map.

Logits are scaled to the size of the images (bilinear), as in DINOv2's linear evaluation, for the test. DINOv2 trains at
this size by AdamW. Here logits are scaled to nearest pixels for training, so that the loss is that of logistic
regression on the cells of the map, with the shares of the classes in each cell as labels. It is minimized to
convergence on standardized features by L-BFGS.

Intersection over union is computed over all pixels of all test images. The mean is over classes that are in a mask or
a prediction, as in mmsegmentation. Ignored pixels count for nothing. A class of the test masks that no training mask
has is never predicted: its value is 0.

Masks are image files, columns of parquet files, or arrays of NPZ files, with the class of every pixel. They are turned
upright by their own EXIF orientation. A mask has the size of its image, and the same centered square of both is used.
Masks are scaled to nearest pixels.
"""

import math
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from fedssl.config.literal import user_path
from fedssl.datasets.decoding import Decoding, Encoded, open_source, unreadable_reason
from fedssl.datasets.geometry import center_square
from fedssl.datasets.image_index import ImageIndex
from fedssl.datasets.manifest import named_file, names_image
from fedssl.datasets.pixels import is_min_is_white, orientation_of, upright, white_of_file
from fedssl.datasets.raster import Raster
from fedssl.datasets.sources import MASK
from fedssl.encoders.base import Encoder
from fedssl.encoders.tokens import TokenEncoder
from fedssl.errors import InputError, shortened
from fedssl.evaluation.labeled_images import LabeledImages
from fedssl.evaluation.linear_probe import fit_linear, standardize
from fedssl.evaluation.protocol import EvaluationInput, EvaluationProtocol
from fedssl.evaluation.scores import FRACTION, Score
from fedssl.machine.memory import available_memory, gigabytes

_CHUNK = 64  # images whose logits have the size of images at a time
_MODES = ("1", "L", "P", "I", "I;16")  # of one number per pixel
_LOSSY = ("JPEG", "MPO")  # WebP and AVIF have no gray images
_MAX_CLASS = 255
_MAX_READ = 32  # splits whose masks are in memory
_TRANSPOSED = 5  # the first EXIF orientation that exchanges width and height


def read_masks(images: LabeledImages, where: str) -> Tensor:
    """Return the classes of the pixels of images, uint8 ``(n, size, size)``.

    ``where`` is a folder with a mask for every image file, of the same name except for its ending, or with ``_mask``
    behind it, in the same subfolders, if any. Otherwise it is a column of the data set.
    """
    if images.origin is None:
        raise InputError(f"evaluation.masks={where} but the data set has no files; use dataset.path=FOLDER")
    index, rows = images.origin
    decoding, folder = index.decoding, user_path(where)
    if folder.is_dir():
        sources: Sequence[Any] = _mask_files(folder, [index.image_name(row) for row in rows])
    else:
        try:
            values, tables = index.values(where), getattr(index, "tables", ())
        except InputError as error:
            if os.sep not in where:
                raise
            raise InputError(f"evaluation.masks={where} is neither a folder nor a column; correct it") from error
        sources = [_named(values[row], tables) for row in rows]
    masks = np.empty((len(rows), decoding.size, decoding.size), np.uint8)
    chosen = {int(row): place for place, row in enumerate(rows)}
    for row, image in enumerate(chain.from_iterable(index.batches(0))):
        if row not in chosen:
            continue
        try:
            mask = _open_mask(sources[chosen[row]], decoding)
            size = _displayed_size(image, decoding)
        except Exception as error:  # a decoder can raise any exception
            reason = unreadable_reason(error)
            raise InputError(f"the mask of {index.image_name(row)} cannot be used: {reason}") from error
        if mask.size != size:
            raise InputError(
                f"the mask of {index.image_name(row)} has {mask.width} x {mask.height} pixels, but the image has "
                f"{size[0]} x {size[1]}; save masks in the size of their images"
            )
        left, top, side = center_square(*size)
        box, side_out = (left, top, left + side, top + side), (decoding.size, decoding.size)
        masks[chosen[row]] = np.asarray(mask.resize(side_out, Image.Resampling.NEAREST, box=box))
    return torch.from_numpy(masks)


def _named(value: Any, tables: Sequence[Path]) -> Any:
    """Return the file that a value of a table names; others unchanged."""
    name = value.get("path") if isinstance(value, dict) and value.get("bytes") is None else value
    return named_file(name, tables[0].parent) if isinstance(name, str) and tables else value


def check_separate(train: LabeledImages, test: LabeledImages, where: str) -> None:
    """Raise an `InputError` if a folder without subfolders gives training and test images the same masks."""
    folder = user_path(where)
    if folder.is_dir() and train.origin is not None and test.origin is not None:
        images = [{index.image_name(row) for row in rows} for index, rows in (train.origin, test.origin)]
        files = [{*_mask_files(folder, sorted(names))} for names in images]
        if files[0] & files[1] and not images[0] & images[1]:
            raise InputError(f"{folder}: training and test images have the same masks; use subfolders as theirs")


def _mask_files(folder: Path, images: Sequence[str]) -> list[Path]:
    """Return the mask of each image: that with the longest common end of its path."""
    files = (path for path in sorted(folder.rglob("*.*")) if names_image(path.name))  # beside others, such as outlines
    own = {Path(image).resolve() for image in images}  # an image is not its own mask
    named, suffixed = defaultdict[str, list[Path]](list), defaultdict[str, list[Path]](list)
    for file in files:
        if file.resolve() not in own:
            named[file.relative_to(folder).with_suffix("").as_posix()].append(file)
    for name, same in named.items():
        if (match := MASK.fullmatch(name)) and match[1] not in named:
            suffixed[match[1]] += same
    # A JPEG file beside another is a preview.
    of_image = {
        name: [file for file in same if file.suffix.lower() not in (".jpg", ".jpeg")] or same
        for name, same in (named | suffixed).items()
    }
    masks = {name: same[0] for name, same in of_image.items()}
    found, missing = list[Path](), list[Path]()
    for image in images:
        paths = (PurePath(image), PurePath(image).with_suffix(""))  # a folder of bands, or photo.jpg.png
        ends = ("/".join(path.parts[start:]) for path in paths for start in range(len(path.parts)))
        mask = next((masks[end] for end in ends if end in masks), None)
        (missing if mask is None else found).append(mask or Path(image))
    if missing:
        raise InputError(
            f"{folder} has no mask for {len(missing)} of {len(images)} images ({shortened(map(str, missing))}); "
            "give each mask the name of its image, except for the ending, or NAME_mask"
        )
    several = next((same for same in of_image.values() if len(same) > 1 and same[0] in found), None)
    if several:
        raise InputError(f"{shortened(map(str, several))} are masks of one image; merge them into one")
    repeated = [str(mask) for mask, number in Counter(found).items() if number > 1]
    if repeated and any(image.endswith("]") for image in images):  # a page
        raise InputError(f"{shortened(repeated)} are masks of files with several images; save one image per file")
    if repeated:
        raise InputError(f"several images have the masks {shortened(repeated)}; use subfolders as theirs")
    return found


def _open_mask(source: Any, decoding: Decoding) -> Image.Image:
    """Return a mask as gray image of 8 bits, whose values are classes."""
    if isinstance(source, np.ndarray):
        values = source.squeeze()
    else:
        content: Encoded | None = source.get("bytes") if isinstance(source, dict) else source
        if not isinstance(content, bytes | Path):
            raise InputError("it has no bytes of an image")
        with open_source(content, decoding) as (_, page):
            if isinstance(page, Raster):
                values = page.load()
            elif page.format in _LOSSY:
                raise InputError("it is a JPEG, whose compression changes class numbers; save masks as PNG")
            elif page.mode not in _MODES:
                raise InputError(f"it has mode {page.mode}, but pixels are class numbers; save gray values")
            elif is_min_is_white(page):  # also of one bit: it is tifffile's default, with 1 for True
                raise InputError("white is 0 in this TIFF, whose class numbers programs invert or not; save it as PNG")
            else:
                white = white_of_file(page)
                values = np.asarray(upright(page))
                if page.mode == "L" and white < _MAX_CLASS:
                    values = np.rint(values * (white / _MAX_CLASS)).astype(np.uint8)
    if values.ndim != 2 or values.dtype.kind not in "uib" or values.min() < 0 or values.max() > _MAX_CLASS:
        found = f"shape {values.shape}, type {values.dtype} and values from {values.min()} to {values.max()}"
        raise InputError(f"it has {found}, but a mask has one class from 0 to {_MAX_CLASS} for each pixel")
    return Image.fromarray(values.astype(np.uint8))


def _displayed_size(source: Encoded, decoding: Decoding) -> tuple[int, int]:
    """Return width and height of an image that is turned upright."""
    with open_source(source, decoding) as (_, page):
        if isinstance(page, Raster):  # whose ``shape`` may be that before it is turned
            height, width = page.load().shape[:2]
            return width, height
        if page.format == "TIFF":
            page.load()  # which turns it
        return (page.height, page.width) if orientation_of(page) >= _TRANSPOSED else page.size


class FeatureMap(nn.Module):
    """Maps images to the output of an encoder's last stage, ``(batch, dim, height, width)``.

    Tokens are a square after the encoder's ``num_prefix_tokens``.
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        if not isinstance(encoder, Encoder) or not any(encoder.stage_names):  # the empty name is a whole network
            raise InputError(
                f"evaluation=segmentation needs an encoder in stages and {type(encoder).__name__} has none; choose "
                "another encoder, such as resnet18 or vit_small, or another evaluation"
            )
        self.encoder = encoder

    def forward(self, images: Tensor) -> Tensor:
        """Return the feature map of each image."""
        x: Tensor
        if isinstance(self.encoder, TokenEncoder):
            x = self.encoder.forward_tokens(self.encoder.embed(images))
        else:
            x = self.encoder.run_stem(images)
            for number in range(1, self.encoder.active_stages.depth + 1):
                x = self.encoder.run_stage(number, x)
        if x.ndim == 3:
            patches = x[:, self.encoder.num_prefix_tokens :].transpose(1, 2)
            side = math.isqrt(patches.shape[2])
            if side**2 != patches.shape[2]:
                raise InputError(
                    f"{type(self.encoder).__name__} returns {x.shape[1]} tokens, which are no square after "
                    f"num_prefix_tokens={self.encoder.num_prefix_tokens}; set this attribute of the encoder to the "
                    "number of tokens before those of patches"
                )
            x = patches.unflatten(2, (side, side))
        return x if x.shape[2] == x.shape[3] else x.permute(0, 3, 1, 2)  # channels last, as of timm's Swin


def class_counts(masks: Tensor, side: int, classes: Tensor) -> Tensor:
    """Return how many pixels of each class are in each cell of a map of ``side x side``: ``(n * side^2, classes)``.

    ``masks`` are uint8 ``(n, size, size)``; pixels of none of the sorted ``classes`` do not count.
    """
    size, number = masks.shape[-1], len(classes)
    cell = torch.arange(size) * side // size
    counts = []
    for chunk in masks.split(_CHUNK):
        place = torch.searchsorted(classes, chunk.contiguous()).clamp_max(number - 1)
        image = torch.arange(len(chunk))[:, None, None]
        index = ((image * side + cell[:, None]) * side + cell) * number + place
        known = classes[place] == chunk
        counts.append(torch.bincount(index[known], minlength=len(chunk) * side**2 * number))
    return torch.cat(counts).view(-1, number).float()


def confusion(predicted: Tensor, masks: Tensor) -> Tensor:
    """Return the number of pixels by their class (rows) and their predicted class, int64 ``(256, 256)``."""
    return torch.bincount(256 * masks.flatten().long() + predicted.flatten().long(), minlength=256**2).view(256, 256)


@dataclass(kw_only=True, eq=False)
class Segmentation(EvaluationProtocol):
    r"""Mean intersection over union as ``segmentation_miou``, and ``segmentation_pixel_accuracy``.

    $$
    \min_{W, b} \; -\frac{1}{\sum_{ic} n_{ic}} \sum_{i, c} n_{ic} \log \operatorname{softmax}(W x_i + b)_c
    + \frac{\lambda}{2} \lVert W \rVert_F^2 \qquad \text{IoU}_c = \frac{|P_c \cap M_c|}{|P_c \cup M_c|}
    $$

    with $x_i$ the standardized features of cell i of a map, $n_{ic}$ the number of its pixels of class c, and $P_c$,
    $M_c$ the pixels of all test images that are predicted as class c, and that are of it.
    """

    trains_network, uses_features, needs_labels = True, False, False

    masks: str = "masks"
    ignore_index: int | None = 255
    l2: float = 1e-4
    max_iterations: int = 300
    # Decoded once for all rounds, by the images.
    _read: dict[tuple[int, bytes], tuple[ImageIndex | None, Tensor]] = field(default_factory=dict, init=False)

    def __call__(self, evaluation_input: EvaluationInput, *, seed: int) -> dict[str, Score]:
        """Evaluate the encoder; raw pixels have no feature map."""
        if evaluation_input.encoder is None:
            return {}
        network = FeatureMap(evaluation_input.encoder)
        train, test = self._masks(evaluation_input.train), self._masks(evaluation_input.test)
        classes = self._classes(train)
        maps, test_maps = (
            evaluation_input.extract(network, labeled.images)
            for labeled in (evaluation_input.train, evaluation_input.test)
        )
        _, dim, side, _ = maps.shape
        counts = class_counts(train, side, classes)
        cells, test_cells = (x.permute(0, 2, 3, 1).reshape(-1, dim) for x in (maps, test_maps))
        known = counts.sum(dim=1) > 0
        x, x_test = standardize(cells[known], test_cells)
        share = counts[known] / counts.sum()

        def loss(logits: Tensor) -> Tensor:
            return -(share * logits.log_softmax(dim=1)).sum()

        w, bias = fit_linear(x, loss, outputs=len(classes), l2=self.l2, max_iterations=self.max_iterations)
        logits = torch.addmm(bias, x_test, w).view(len(test), side, side, -1).permute(0, 3, 1, 2)
        pixels, count = torch.zeros(256, 256, dtype=torch.int64), 0
        for chunk, expected in zip(logits.split(_CHUNK), test.split(_CHUNK), strict=True):
            scaled = F.interpolate(chunk, expected.shape[1:], mode="bilinear")
            ignored = self.ignore_index
            used = torch.ones_like(expected, dtype=torch.bool) if ignored is None else expected != ignored
            pixels += confusion(classes[scaled.argmax(dim=1)][used], expected[used])
            count += int(used.flatten(1).any(dim=1).sum())
        return _scores(pixels, num_images=count)

    def result_units(self, num_classes: int) -> dict[str, str]:
        return dict.fromkeys(("segmentation_miou", "segmentation_pixel_accuracy"), FRACTION)

    def validate(self, evaluation_input: EvaluationInput, *, feature_dim: int) -> None:
        train, test = evaluation_input.train, evaluation_input.test
        check_separate(train, test, self.masks)
        if len(self._classes(self._masks(train))) < 2 or not len(self._classes(self._masks(test))):
            raise InputError(
                f"the masks of evaluation.masks={self.masks} have a single class in training images, or none in test "
                f"images, beside evaluation.ignore_index={self.ignore_index}; set evaluation.ignore_index=null if 255 "
                "is a class"
            )
        if evaluation_input.encoder is not None:
            one = evaluation_input.extract(FeatureMap(evaluation_input.encoder), train.images.subset(torch.arange(1)))
            needed, available = 2 * one.nbytes * (len(train.labels) + len(test.labels)), available_memory()
            if available is not None and needed > available:
                raise InputError(
                    f"feature maps of all images need {gigabytes(needed)} of memory, and {gigabytes(available)} are "
                    "available; set dataset.limit and dataset.test_limit"
                )

    def _masks(self, images: LabeledImages) -> Tensor:
        index, rows = images.origin or (None, torch.empty(0).numpy())
        key = id(index), rows.tobytes()
        if key not in self._read:
            self._read[key] = index, read_masks(images, self.masks)
            if len(self._read) > _MAX_READ:
                del self._read[next(iter(self._read))]
        return self._read[key][1]

    def _classes(self, masks: Tensor) -> Tensor:
        """Return the classes of masks, uint8, without the ignored one."""
        found: Tensor = masks.unique()
        return found if self.ignore_index is None else found[found != self.ignore_index]


def _scores(pixels: Tensor, *, num_images: int) -> dict[str, Score]:
    """Return the results of the confusion matrix of ``num_images``."""
    right, union = pixels.diagonal().double(), pixels.sum(dim=0) + pixels.sum(dim=1) - pixels.diagonal()
    parts = {str(name): (right[name] / union[name]).item() for name in union.nonzero().flatten().tolist()}
    if not parts:
        return {}
    miou = Score.over_parts(parts, FRACTION, num_images=num_images)
    accuracy = Score((right.sum() / pixels.sum()).item(), FRACTION, num_images=num_images)
    return {"segmentation_miou": miou, "segmentation_pixel_accuracy": accuracy}
