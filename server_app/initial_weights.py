"""Initial weights of a run from a source (``encoder.weights``): statistics of its images, and a copy of the weights.

Clients do not receive the source. They receive the initial layers in the first round, as in every run, and the
statistics as settings of their data.
"""

import logging
from pathlib import Path

import torch

from fedssl.config.load import with_values
from fedssl.config.overrides import parse
from fedssl.config.saved_run import INITIAL_ENCODER_FILE
from fedssl.config.settings import Settings
from fedssl.pretrained.loading import initial_statistics, load_pretrained, store_initial_encoder

log = logging.getLogger("fedssl")


def adopt_statistics(settings: Settings) -> Settings:
    """Return settings of a new run with the source's mean and standard deviation, except those that were overridden."""
    source, data, recording = settings.model.weights, settings.data, settings.recording
    if source is None or recording.resumed is not None:
        return settings
    statistics = initial_statistics(source, channels=data.channels)
    if statistics is None:
        log.warning(
            "encoder.weights=%s has no statistics of its images; set dataset.mean (now %s) and dataset.std (now %s) to "
            "those of its training",
            *(source, list(data.mean), list(data.std)),
        )
        return settings
    explicit = {override.key_or_group for override in parse(recording.overrides)}
    adopted = {
        key: list(values)
        for key, values in zip(("mean", "std"), statistics, strict=True)
        if f"dataset.{key}" not in explicit
    }
    log.info(
        "statistics of the images of encoder.weights=%s: %s",
        source,
        " ".join(f"dataset.{key}={values}" for key, values in adopted.items()) or "none, both are overridden",
    )
    return with_values(settings, {"dataset": {**recording.config.dataset, **adopted}})


def store_initial_weights(settings: Settings, folder: Path) -> None:
    """Write the initial encoder of a new run into its folder, from which the run is resumed without the source."""
    source = settings.model.weights
    if source is None or settings.recording.resumed is not None:
        return
    with torch.random.fork_rng(devices=[]):
        encoder = settings.model.encoder.instantiate()
        log.info("encoder.weights=%s: %s", source, load_pretrained(encoder, source))
    store_initial_encoder(encoder, folder / INITIAL_ENCODER_FILE)
