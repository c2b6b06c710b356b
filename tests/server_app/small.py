"""A federation of a method with one weight and one statistic, whose layers are easy to follow by hand."""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fedssl.arrays import GlobalLayers
from fedssl.config.aggregation_settings import AggregationSettings
from fedssl.encoders.base import Encoder
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import exchanged_layers
from fedssl.wire.records import EXACT
from server_app.validation import UpdateValidator
from tests.contexts import default_settings, federation_of, run_context

LAYERS = {"encoder.weight": np.array([1, 2, 2], np.float32), "encoder.bn.running_mean": np.array([0.5], np.float32)}


class Small(SSLMethod):
    """A method whose layers are `LAYERS`."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.encoder.weight = nn.Parameter(torch.from_numpy(LAYERS["encoder.weight"].copy()))
        self.encoder.bn = nn.Module()
        self.encoder.bn.register_buffer("running_mean", torch.from_numpy(LAYERS["encoder.bn.running_mean"].copy()))
        self.encoder.define_stages(stages=(), widths=())


def update_validator():
    """Accepts updates to plans of the code "x", without parts for the method's server side and without metrics."""
    nothing = GlobalLayers({})
    return UpdateValidator(gathered=nothing, required_metrics=(), code_fingerprint="x", codec=EXACT, max_examples=None)


def small_federation(grid, strategy, *, clients_per_round=None, timeout=60, metrics=(), **updates):
    """All nodes of the grid as clients of a `Small`; ``updates`` are `AggregationSettings`."""
    settings = default_settings()
    context = run_context(
        Small(),
        initial_layers=lambda: exchanged_layers(Small()),
        clients_per_round=clients_per_round or len(list(grid.get_node_ids())),
        reply_timeout=timeout,
        aggregation=AggregationSettings(**updates),
        algorithm=replace(settings.algorithm, reported_metrics=tuple(metrics)),
    )
    return federation_of(grid, strategy, context)
