"""Reject runs whose cost cannot be estimated, or that do not fit into memory or on the disk.

A remedy names settings that were checked by the same estimate.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from client_app.step_memory import StepMemory, estimate_step_memory
from fedssl.config.load import parse_client_config
from fedssl.config.settings import Settings
from fedssl.errors import InputError, RequestRefused
from fedssl.machine.devices import check_cuda_features, is_gpu, select_device
from fedssl.machine.memory import available_memory, gigabytes, resident_memory
from fedssl.machine.process import available_cores
from server_app.build import RunComponents
from simulation.cost_counts import batch_size, images_of

if TYPE_CHECKING:
    from simulation.plan import Plan


def check_settings(settings: Settings) -> None:
    """Raise `InputError` if the cost of a run cannot be estimated."""
    if settings.recording.resumed is not None:
        raise InputError("plan=true estimates a new run; leave out resume")
    if settings.pause_after is not None:
        raise InputError("plan=true estimates a complete run; leave out pause_after")
    if settings.engine.name == "deployment":
        raise InputError(
            "plan=true cannot estimate engine=deployment, because the images of devices are unknown; set engine=auto "
            "for a simulation"
        )
    if settings.engine.address is not None:
        raise InputError("plan=true estimates a run on this machine; leave out engine.address")
    if settings.secure_aggregation is not None:
        raise InputError("plan=true cannot estimate the messages of secure_aggregation; set secure_aggregation=none")
    on_cpus = settings.engine.name == "ray" and settings.engine.client_gpus == 0
    check_cuda_features(settings.training, select_device("cpu" if on_cpus else settings.machine.device))


def check_step_memory(components: RunComponents) -> None:
    """Raise `InputError` if a training step does not fit into memory, before it is measured."""
    size, available = _largest_batch(components), available_memory()
    needed = _step_memory(components)
    if needed is None or available is None or needed.of_batch(size) <= available:
        return
    largest = needed.largest_batch(available)
    remedy = f"batch_size={largest} fits" if largest > 1 else "choose a smaller encoder or smaller images"
    raise InputError(
        f"a training step with {size} images needs about {gigabytes(needed.of_batch(size))} of memory, and "
        f"{gigabytes(available)} are available; {remedy}"
    )


def check_memory(plan: "Plan", components: RunComponents) -> None:
    """Raise `InputError` if a run does not fit into memory."""
    available = available_memory(reusable=resident_memory())
    if available is None or plan.memory <= available:
        return
    raise InputError(
        f"the run needs {gigabytes(plan.memory)} of memory, and {gigabytes(available)} are available; "
        f"{_remedy(plan, components, available)}"
    )


def _remedy(plan: "Plan", components: RunComponents, available: int) -> str:
    """Return settings with which the run fits: fewer clients at once, one process, or smaller batches."""
    if plan.worker_memory:
        fitting = (available - plan.server_memory) // plan.worker_memory
        if fitting > 0:
            return f"engine.client_cpus={available_cores() // fitting} runs {fitting} clients at once, which fit"
        # A process that does both has the imports and images once.
        if max(plan.server_memory, plan.worker_memory) <= available:
            return "engine=local fits"
    size, step = _largest_batch(components), _step_memory(components)
    if step is not None:
        largest = step.largest_batch(step.of_batch(size) - (plan.memory - available))
        if 1 < largest < size:
            return f"batch_size={largest} fits"
    return "choose a smaller encoder, or lower clients_per_round if the strategy holds all updates or several models"


def _largest_batch(components: RunComponents) -> int:
    return batch_size(components, images_of(components, max))


def _step_memory(components: RunComponents) -> StepMemory | None:
    """Return the estimated memory of a training step; None on a GPU, and for an encoder without an estimate."""
    if is_gpu(components.device):
        return None
    try:
        return estimate_step_memory(parse_client_config(components.settings.client_yaml))
    except RequestRefused:  # an encoder of the user that needs its numbers
        return None


def check_disk(plan: "Plan", settings: Settings) -> None:
    """Raise `InputError` if the files of a run do not fit on the disk of its folder."""
    assert settings.recording.folder is not None
    folder: Path = settings.recording.folder
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if plan.disk <= free:
        return
    remedies = ["set output_dir to another disk"]
    if settings.recording.snapshot_every:
        remedies.insert(0, "raise snapshot_every")
    raise InputError(
        f"the run needs {gigabytes(plan.disk)} for checkpoints, updates, client states, snapshots and encoders, and "
        f"{gigabytes(free)} are free in {existing}; {', or '.join(remedies)}"
    )
