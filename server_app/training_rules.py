"""Rules about the encoder, the method and the schedule of a run."""

from fedssl.config.settings import Settings
from fedssl.rules import Problem
from strategies.rules import RunParts


def encoder_has_size_of_images(settings: Settings) -> Problem:
    """Require an encoder for the size of the images."""
    size, data_size = settings.model.encoder.values.get("size"), settings.data.size
    if size is None or size == data_size:
        return None
    return (
        f"encoder.size={size} but dataset.size={data_size}, which it follows; leave encoder.size out, or set "
        f"dataset.size={size}"
    )


def batches_suffice(parts: RunParts) -> Problem:
    """Require batches that are large enough for the method."""
    batch_size, smallest = parts.settings.training.batch_size, parts.method.min_batch_size
    if batch_size >= smallest:
        return None
    return (
        f"batch_size={batch_size} but {type(parts.method).__name__} needs batches of at least {smallest} images; "
        f"set batch_size={smallest} or more, better 64"
    )


def compiled_encoder_is_trained(parts: RunParts) -> Problem:
    """Refuse to compile an encoder whose ``forward`` is not used in training."""
    method = parts.method
    if not (parts.settings.machine.compile_encoder and method.masks_patches):
        return None
    if "encoder" in method.regularized_parts:
        return None
    return (
        f"compile=true compiles the encoder for whole images, but {type(method).__name__} trains it on patches; "
        "set compile=false"
    )


def regularizer_has_its_input(parts: RunParts) -> Problem:
    """Refuse a schedule that freezes trained stages whose input the regularizer needs."""
    phases = parts.context.phases
    freezes = len(phases) > 1 and any(phase.frozen for phase in phases)
    if not freezes or parts.regularizer.supports_frozen_stages:
        return None
    return (
        f"{type(parts.regularizer).__name__} compares representations of images, but the schedule freezes trained "
        "stages and trains on their output; set schedule=end_to_end or schedule=progressive, or another regularizer"
    )


def phases_stay(parts: RunParts) -> Problem:
    """Refuse another number of rounds of a resumed run with several phases, which depend on it."""
    recording, rounds = parts.settings.recording, parts.settings.rounds
    if recording.resumed in (None, rounds) or len(parts.context.phases) == 1:
        return None
    return (
        f"resume={recording.folder} was run with rounds={recording.resumed} (now {rounds}); keep the "
        "number, or start a new run"
    )


SETTINGS_RULES = (encoder_has_size_of_images,)
RUN_RULES = (batches_suffice, compiled_encoder_is_trained, regularizer_has_its_input, phases_stay)
