"""FedBN: batch norm is found by type, stays with the client, and is averaged for the global model."""

import numpy as np
import torch
from torch import nn

from fedssl.encoders.base import Encoder
from fedssl.methods.base import SSLMethod
from fedssl.wire.messages import TrainPlan
from strategies.fedbn import batch_norm_names
from tests.federation import Federation
from tests.states import load_tensors


class Toy(SSLMethod):
    def __init__(self, *modules):
        super().__init__()
        self.encoder = Encoder()
        for number, module in enumerate(modules):
            self.encoder.add_module(str(number), module)


def test_batch_norm_is_found_by_type():
    method = Toy(nn.Conv2d(1, 2, 1), nn.Sequential(nn.BatchNorm2d(2)), nn.LayerNorm(2), nn.BatchNorm1d(3, affine=False))
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert batch_norm_names(method) == [
        *(f"encoder.1.0.{name}" for name in ("weight", "bias", *statistics)),
        *(f"encoder.3.{name}" for name in statistics),
    ]


def test_batch_norm_is_local_and_the_rest_global(tmp_path):
    federation = Federation(tmp_path, "strategy=fedbn", "method=byol", "num_clients=2")
    first = federation.run(1)
    sent = [{name: array.numpy().copy() for name, array in update["arrays"].items()} for update in federation.updates]
    norms = set(batch_norm_names(federation.method)) & set(first)
    assert norms
    assert norms < set(first)

    # The global model, which is evaluated, has the average of everything.
    shares = np.array([row.examples for row in federation.report.clients], float)
    for name, array in first.items():
        mean = sum(
            share * layers[name].astype(float) for share, layers in zip(shares / shares.sum(), sent, strict=True)
        )
        np.testing.assert_allclose(array, np.rint(mean) if array.dtype.kind == "i" else mean, rtol=1e-5, atol=1e-7)

    # In the next round a client trains from its own batch norm and the global rest.
    plan = TrainPlan(round=2, layers=first, settings="", metrics=(), oldest_resumable_round=0, code_fingerprint="")
    for client, own in enumerate(sent):
        state = load_tensors(tmp_path / "clients" / "0000" / str(client), before=2)
        federation.strategy.client.load_start(federation.method, plan, state)
        for name in first:
            expected = own[name] if name in norms else first[name]
            assert torch.equal(federation.method.named_tensors[name], torch.from_numpy(expected)), name
