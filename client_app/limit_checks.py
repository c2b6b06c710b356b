"""Checks of server requests against the limits of an edge client, before anything is built, allocated or read."""

from dataclasses import replace
from typing import Any

from flwr.app import RecordDict

from client_app.memory_retry import smallest_batch
from client_app.step_memory import estimate_step_memory
from fedssl.config.component import Component
from fedssl.config.settings import ClientSettings
from fedssl.errors import RequestRefused
from fedssl.fleet.limits import Limits
from fedssl.machine.memory import gigabytes
from fedssl.wire.messages import TrainPlan
from fedssl.wire.wire_format import WEIGHTS

_AMPLE = 4  # memory is ample for this many steps


def check_message(content: RecordDict, limits: Limits) -> None:
    """Refuse a message larger than the allowed memory; raises `RequestRefused`."""
    arrays = [pair for record in content.array_records.values() for pair in record.items()]
    # Quantized weights have one or two bytes, and are decoded to four.
    num_bytes = sum(len(array.data) * (4 if name == WEIGHTS else 1) for name, array in arrays)
    allowed = limits.memory_bytes()
    if num_bytes > allowed:
        raise RequestRefused(
            f"the message brings {gigabytes(num_bytes)} of memory but this device allows {gigabytes(allowed)}"
        )


def check_plan(plan: TrainPlan) -> None:
    """Refuse invalid numbers of a plan; raises `RequestRefused`."""
    ranges: dict[str, tuple[float, float, float]] = {
        "round": (plan.round, 1, 10**6),
        "oldest-resumable-round": (plan.oldest_resumable_round, 0, plan.round),
        "last-used-round": (plan.last_used_round or 0, 0, plan.round - 1),
        "lr-factor": (plan.lr_factor, 0, 1000),
        "num-stages": (1 if plan.num_stages is None else plan.num_stages, 1, 256),
        "num-frozen-stages": (plan.num_frozen_stages, 0, plan.num_stages or 0),
        "depth-dropout": (plan.depth_dropout, 0, 1),
        "models to choose from": (1 + len(plan.candidate_arrays), 1, 64),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise RequestRefused(f"{name}={value} of the plan is not from {low} to {high:g}")


def check_settings(settings: ClientSettings, limits: Limits, *, num_images: int) -> bool:
    """Refuse training beyond the limits, for ``num_images`` local images; raises `RequestRefused`.

    Return whether there is ample memory, so that freed memory may be kept for the next step, which is faster.
    """
    training, data = settings.training, settings.data
    asked: dict[str, tuple[Any, float]] = {
        "local_epochs": (training.epochs, limits.epochs),
        "batch_size": (training.batch_size, limits.batch),
        "dataset.size": (data.size, limits.size),
    }
    for name, (value, maximum) in asked.items():
        if value > maximum:
            raise RequestRefused(f"{name}={value} but this device allows {maximum:g} at most")
    for part in (training.augmentation, settings.model.encoder):  # both have settings of the images
        for name, value in (("size", data.size), ("channels", data.channels)):
            if part.values.get(name, value) != value:
                raise RequestRefused(f"{part.name} is for {name}={part.values[name]} but the images have {value}")
    step, batch, allowed = estimate_step_memory(settings), min(training.batch_size, num_images), limits.memory_bytes()
    teacher = settings.model.method.values.get("teacher_encoder")  # valid, since the step was estimated
    size = teacher["arguments"]["size"] if teacher else 0
    if size > limits.size:
        raise RequestRefused(f"the teacher has images of {size} pixels but this device allows {limits.size} at most")
    needed = step.of_batch(batch)
    if needed > allowed:
        raise RequestRefused(
            f"a training step takes about {gigabytes(needed)} of memory but this device allows {gigabytes(allowed)}; "
            f"{_smaller_step(settings, allowed)}"
        )
    return needed * _AMPLE <= allowed


def _smaller_step(settings: ClientSettings, allowed: int) -> str:
    """Return a remedy: settings whose step fits into the allowed memory, if a smaller batch or stem has one."""
    encoder, remedies, smallest = settings.model.encoder, [], smallest_batch(settings)
    batch_size = estimate_step_memory(settings).largest_batch(allowed)
    if batch_size >= smallest:
        remedies.append(f"batch_size={batch_size}")
    if encoder.values.get("stem") == "small":
        imagenet = replace(settings.model, encoder=Component({**encoder.values, "stem": "imagenet"}))
        batch_size = estimate_step_memory(replace(settings, model=imagenet)).largest_batch(allowed)
        if batch_size >= smallest:
            batch_size = min(batch_size, settings.training.batch_size)
            remedies.append(f"encoder.stem=imagenet and batch_size={batch_size}")
    if remedies:
        return f"set {', or '.join(remedies)}"
    return "no batch_size fits; set a smaller encoder or dataset.size"
