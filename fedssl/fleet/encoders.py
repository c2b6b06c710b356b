"""Encoders that a server delivered, verified before they are stored, and their quality on the images of a device."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from fedssl.atomic_files import atomic_write, remove, round_file, write_text
from fedssl.config.overrides import check_run_id
from fedssl.errors import InputError, RequestRefused
from fedssl.fleet.certificates import verify
from fedssl.safe_io import read_text
from fedssl.wire.delivery import EncoderDelivery

FOLDER = "encoders"  # in the folder of states
KEPT = 2  # encoders per run
NUM_IMAGES = 256
MIN_DEVICES = 3  # an operator receives no mean over fewer
METRICS = ("effective_rank", "covariance_rank", "spread", "uniformity")


def store_encoder(
    delivery: EncoderDelivery, states: Path, *, authority: Path | None, folders: Sequence[Path] = ()
) -> Path:
    """Verify a delivered encoder, store it and return its file; raises `RequestRefused`, and then nothing is stored.

    With the certificate of an ``authority`` the signature of its server is required. ``folders`` are config directories
    with further encoders.
    """
    try:
        check_run_id(delivery.run_id)
        if authority is not None:
            verify(
                delivery.signed_text,
                delivery.signature,
                certificate=delivery.certificate,
                authority=authority.read_bytes(),
            )
    except (InputError, ValueError) as error:
        raise RequestRefused(f"the encoder of round {delivery.round} is refused: {error}") from error
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        file.write(delivery.content)
        file.flush()
        try:
            load_delivered(Path(file.name), folders)
        except InputError as error:  # it contains a path
            raise RequestRefused(
                f"the encoder of round {delivery.round} is refused: it is damaged or of a class that "
                "this device does not have"
            ) from error
    folder = states / FOLDER / delivery.run_id
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "run_id": delivery.run_id,
        "round": delivery.round,
        "model": delivery.model,
        "sha256": delivery.digest,
        "signed": authority is not None,
        "delivery": 1 + max(map(_delivery_number, (states / FOLDER).glob("*/round-*.pt")), default=0),
    }
    atomic_write(round_file(folder, delivery.round), lambda stream: stream.write(delivery.content))
    write_text(round_file(folder, delivery.round, "json"), json.dumps(fields, indent=2) + "\n")
    for old in sorted(folder.glob("round-*.pt"), key=_delivery_number)[:-KEPT]:
        remove(old)
        remove(old.with_suffix(".json"))
    return round_file(folder, delivery.round)


def _delivery_number(file: Path) -> int:
    """Return the number of the delivery of an encoder file, which increases; 0 if it is unknown."""
    try:
        return int(json.loads(read_text(file.with_suffix(".json")) or "")["delivery"])
    except (ValueError, KeyError, TypeError):
        return 0


def load_delivered(file: Path, folders: Sequence[Path] = ()) -> Any:
    """Return the encoder of a file as `fedssl.export.load_encoder`, also of a config directory; raises `InputError`."""
    from fedssl.export.encoder_file import load_user_encoder  # slow import

    return load_user_encoder(file, folders)


def stored_encoders(states: Path) -> list[tuple[Path, Mapping[str, Any]]]:
    """Return the files of all stored encoders with their origin, the last delivered last, without damaged ones."""
    found = []
    for file in (states / FOLDER).glob("*/round-*.pt"):
        try:
            fields = json.loads(read_text(file.with_suffix(".json")) or "")
            delivery = EncoderDelivery(
                run_id=fields["run_id"], round=fields["round"], model=fields["model"], content=file.read_bytes()
            )
            if delivery.digest != fields["sha256"]:
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError, InputError):
            continue
        found.append((file, fields))
    return sorted(found, key=lambda pair: (_delivery_number(pair[0]), pair[0].stat().st_mtime))


def encoder_quality(file: Path, images: Path, *, folders: Sequence[Path] = ()) -> dict[str, float]:
    """Return `METRICS` of `fedssl.evaluation.collapse_metrics` on at most `NUM_IMAGES` local images, always the same.

    ``file`` is of `fedssl.export.save_encoder`, ``images`` a folder, and ``folders`` are config directories with
    further encoders. Raise `InputError` if fewer than two images can be read.
    """
    from fedssl.datasets import folder  # slow imports
    from fedssl.datasets.path_index import ALL_IMAGES
    from fedssl.datasets.raster import pixel_settings
    from fedssl.evaluation import collapse_metrics
    from fedssl.evaluation.features import extract

    encoder = load_delivered(file, folders)
    data = folder.read(
        "train",
        channels=encoder.channels,
        size=encoder.size,
        limit=NUM_IMAGES,
        path=str(images),
        **ALL_IMAGES,
        **pixel_settings(encoder.metadata),
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
