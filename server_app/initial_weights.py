"""Weights that a run reads from files: those of its teacher, and its initial ones (``encoder.weights``).

Clients do not receive the files. They receive the initial layers in the first round, as in every run, the statistics of
the source's images as settings of their data, and the teacher's weights once. A resumed run reads the teacher from its
checkpoint.
"""

from pathlib import Path

import torch

from fedssl.atomic_files import saved_rounds
from fedssl.config.load import with_values
from fedssl.config.overrides import parse
from fedssl.config.saved_run import INITIAL_ENCODER_FILE
from fedssl.config.settings import Settings
from fedssl.datasets.raster import PIXELS, adopt_pixels
from fedssl.errors import InputError
from fedssl.export import load_weights
from fedssl.logs import log
from fedssl.methods.base import TEACHER, SSLMethod
from fedssl.model_arrays import load_layers, part_name
from fedssl.pretrained.loading import initial_pixels, initial_statistics, load_pretrained, store_initial_encoder
from fedssl.rules import Problem
from strategies.rules import RunParts
from strategies.types import ServerState


def teacher_exists(settings: Settings) -> Problem:
    """Require the teacher's file, from which a method may need the architecture.

    A resumed run does not need it, because its checkpoints have the weights.
    """
    file = settings.teacher
    if file is None or file.exists() or teacher_is_saved(settings):
        return None
    return f"teacher={file} does not exist; choose the encoder.pt of a run folder"


def teacher_is_used(parts: RunParts) -> Problem:
    """Require a teacher if the method has one, and refuse it otherwise."""
    name, file = type(parts.method).__name__, parts.settings.teacher
    if file is not None and TEACHER not in parts.method.static_parts:
        return (
            f"teacher={file} but {name} uses no teacher; set method=fedca method.alignment_weight=0.1 or "
            "method=distillation, or leave teacher out"
        )
    if file is None and TEACHER in parts.method.static_parts:
        return (
            f"teacher=null but {name} needs a teacher; give teacher=FILE, the encoder.pt of a run on public "
            "images, or set method.alignment_weight=0"
        )
    return None


def teacher_is_saved(settings: Settings) -> bool:
    """Return whether the teacher's file does not exist, and checkpoints of the resumed run have its weights."""
    file, recording = settings.teacher, settings.recording
    if file is None or file.exists() or recording.resumed is None or recording.folder is None:
        return False
    return bool(saved_rounds(recording.folder / "checkpoints"))


def restore_teacher(method: SSLMethod, state: ServerState) -> None:
    """Load the weights of the teacher from the state of a resumed run into the server's method, if it has any."""
    model = next(iter(state.models.values()), None)
    if model is not None:
        load_layers(method, {name: layer for name, layer in model.broadcast.items() if part_name(name) == TEACHER})


def load_teacher(method: SSLMethod, settings: Settings) -> None:
    """Load the teacher from its file into the server's method. Clients receive its weights once, and no path.

    Raises `InputError` if the file has another encoder, or its teacher was trained on images of other channels.
    """
    file, data = settings.teacher, settings.data
    if file is None or TEACHER not in method.static_parts:
        return
    if teacher_is_saved(settings):
        log.info("teacher=%s does not exist; the checkpoint has its weights", file)
        return
    metadata = load_weights(file, method.get_submodule(TEACHER))
    own = settings.model.encoder.values
    if "teacher_encoder" not in settings.model.method.values:  # the teacher has the architecture of the encoder
        unequal = [
            f"encoder.{key}={own[key]} (there {metadata['encoder'][key]})"
            for key in own.keys() & metadata["encoder"].keys() - {"channels", "size", "weights"}
            if own[key] != metadata["encoder"][key]
        ]
        if unequal:
            raise InputError(
                f"teacher={file} holds another encoder than this run's: {', '.join(sorted(unequal))}; give one with "
                "the same settings of encoder"
            )
    channels = len(metadata["mean"])
    if data.channels not in (1, channels):
        raise InputError(
            f"the teacher of {file} was trained on images with {channels} channel(s) but dataset.channels="
            f"{data.channels}; set dataset.channels={channels}, or give another teacher"
        )
    here = {"size": data.size, "mean": list(data.mean), "std": list(data.std)} if method.teacher_sees_views else {}
    here |= {key: data.reader.values[key] for key in PIXELS.keys() & data.reader.values.keys()}
    others = [f"dataset.{key}={here[key]} (there {metadata[key]})" for key in here if here[key] != metadata[key]]
    if others:
        log.warning("the teacher of %s was trained with other preprocessing: %s", file, ", ".join(others))


SETTINGS_RULES = (teacher_exists,)
RUN_RULES = (teacher_is_used,)


def warn_of_random_weights(settings: Settings) -> None:
    """Warn if the tuning freezes weights of the encoder that are random, whose features are then those of noise."""
    model, choices = settings.model, settings.recording.choices
    if model.weights is None and settings.recording.resumed is None and choices.get("tuning") != "full":
        log.warning(
            "tuning=%s freezes weights of the encoder, which are random without encoder.weights; set encoder.weights "
            "to a trained encoder, or tuning=full",
            choices.get("tuning"),
        )


def warn_of_late_starts(method: SSLMethod, rounds: int) -> None:
    """Warn of what the method does only after the last round, such as the training of prototypes."""
    for setting, first in method.late_starts.items():
        if first > rounds:
            log.warning(
                "what %s delays starts in round %d, after the last one (rounds=%d); lower it", setting, first, rounds
            )


def adopt_statistics(settings: Settings) -> Settings:
    """Return settings of a new run with the source's mean, standard deviation and pixels, except overridden ones."""
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
    adopted = {key: list(values) for key, values in statistics.items() if f"dataset.{key}" not in explicit}
    given = {key.removeprefix("dataset.") for key in explicit}
    reader, pixels = data.reader.values, adopt_pixels(data.reader.values, initial_pixels(source), keep=given)
    adopted |= {key: value for key, value in pixels.items() if value != reader[key]}
    log.info(
        "statistics of the images of encoder.weights=%s: %s",
        source,
        " ".join(f"dataset.{key}={values}" for key, values in adopted.items()) or "none, all are overridden",
    )
    config = recording.config
    views = {key: value for key, value in adopted.items() if key in config.augmentation}
    return with_values(
        settings, {"dataset": {**config.dataset, **adopted}, "augmentation": {**config.augmentation, **views}}
    )


def store_initial_weights(settings: Settings, folder: Path) -> None:
    """Write the initial encoder of a new run into its folder, from which the run is resumed without the source."""
    source = settings.model.weights
    if source is None or settings.recording.resumed is not None:
        return
    with torch.random.fork_rng(devices=[]):
        encoder = settings.model.encoder.instantiate()
        log.info("encoder.weights=%s: %s", source, load_pretrained(encoder, source))
    store_initial_encoder(encoder, folder / INITIAL_ENCODER_FILE)
