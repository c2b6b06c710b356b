"""Construction of a method from its settings."""

import torch

from fedssl.config.settings import ModelSettings
from fedssl.methods.base import SSLMethod
from fedssl.schedule.phases import make_phases
from fedssl.seeding import derive_seed


def build_method(model: ModelSettings) -> SSLMethod:
    """Build the method with its encoder and heads, initialized from the run's seed alone.

    Raises
    ------
    InputError
        If the settings of a part, or the schedule, are not valid.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(model.seed, "initialise"))
        encoder = model.encoder.instantiate()
        phases = make_phases(model.schedule, stages=len(encoder.stage_names))
        if phases[0].depth < len(encoder.stage_names):
            with torch.random.fork_rng(devices=[]):  # heads have the same initial weights under every schedule
                encoder.add_bridges()
        method: SSLMethod = model.method.instantiate(encoder=encoder)
    return method
