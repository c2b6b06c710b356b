"""Label-free quality of a delivered encoder on the images of a device."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from fedssl.fleet.encoders import load_delivered

NUM_IMAGES = 256
MIN_DEVICES = 3  # an operator receives no mean over fewer
METRICS = ("effective_rank", "covariance_rank", "spread", "uniformity")


def encoder_quality(
    file: Path, images: Path, *, folders: Sequence[Path] = (), num_images: int = NUM_IMAGES
) -> dict[str, float]:
    """Return `METRICS` of `fedssl.evaluation.collapse_metrics` on at most ``num_images`` local images, always the same.

    ``file`` is of `fedssl.export.save_encoder`, ``images`` a folder, and ``folders`` are config directories with
    further encoders. Raise `InputError` if fewer than two images can be read.
    """
    from fedssl.datasets import image_folder  # slow imports
    from fedssl.errors import InputError
    from fedssl.evaluation import collapse_metrics
    from fedssl.evaluation.features import extract

    encoder = load_delivered(file, folders)
    data = image_folder.read(
        "train",
        channels=encoder.channels,
        size=encoder.size,
        limit=num_images,
        path=str(images),
        **image_folder.ALL_IMAGES,
        background=encoder.preprocess.background,
        max_value=encoder.preprocess.max_value,
    )
    if data is None or len(data.images) < 2:
        raise InputError(f"{images} has fewer than two images that can be read; add images")
    h = extract(encoder, data.images, mean=encoder.mean, std=encoder.std, device="cpu")
    functions = (
        collapse_metrics.effective_rank,
        collapse_metrics.covariance_rank,
        collapse_metrics.dimension_std,
        collapse_metrics.uniformity,
    )
    return dict(zip(METRICS, (function(h) for function in functions), strict=True))


def mean_quality(reported: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    """Return the mean of every metric over devices; None for fewer than `MIN_DEVICES`."""
    if len(reported) < MIN_DEVICES:
        return None
    return {name: mean(quality[name] for quality in reported) for name in METRICS}
