"""Self-supervised methods, one per file, and the one place that builds them from the settings."""

import torch
from omegaconf import DictConfig

from fedssl.config import grows, make
from fedssl.methods.base import SSLMethod
from fedssl.seeding import derive


def build(settings: DictConfig) -> SSLMethod:
    """The method with its encoder and heads, initialised from the run's seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(settings.seed, "initialise"))
        encoder = make(settings.encoder)
        if grows(settings):
            with torch.random.fork_rng(devices=[]):  # heads begin with the same weights under every schedule
                encoder.add_bridges()
        method: SSLMethod = make(settings.method, encoder=encoder)
    return method
