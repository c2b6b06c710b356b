"""Rounds in which layers travel in fewer bytes: the same on all engines, nothing lost, and compared rightly."""

import math
from dataclasses import replace

import numpy as np
import pytest

from client_app.app import app as client_app
from fedssl.config.constraint_table import WIRE_DTYPES
from fedssl.config.load import compose
from fedssl.wire.messages import TrainPlan
from fedssl.wire.records import EXACT, Codec
from server_app.build import build_run
from server_app.exchanges.wall_clock import WallClockExchange
from server_app.training_loop import run_round
from simulation.grid import LocalGrid
from strategies.types import ServerState
from tests.arrays import same_bits
from tests.federation import TINY, Federation
from tests.server_app.small import LAYERS
from tests.server_app.test_stragglers import Run
from tests.wire import NetworkGrid

SHORT = [wire_dtype for wire_dtype in WIRE_DTYPES if wire_dtype != "fp32"]
SMALL = [*TINY, "measure_resources=false"]

EVERY = {
    "l_dawa": ["strategy=l_dawa"],
    "l_dawa at the clients": ["strategy=l_dawa", "strategy.scale_at=client"],
    "euc": ["strategy=euc", "clients_per_round=2"],  # clients send layers that they have not received
    "fedu": ["strategy=fedu", "method=byol", "strategy.aggregate=target", "strategy.update=both"],
    "orchestra": ["method=orchestra", "strategy=fedavg"],
    "layer-wise": ["strategy=fedema", "schedule=layer_wise"],
    "calibrated": ["strategy=fedbn", "schedule=layer_wise", "calibration=auxiliary", "num_clients=2"],
    "eua": ["strategy=eua", "server_optimizer=fedadam"],
    "local_only": ["strategy=local_only"],
    "gossip": ["strategy=gossip"],
    "featarc": ["strategy=featarc", "strategy.num_images=16"],
    "clustered": ["strategy=clustered", "strategy.num_images=16", "strategy.rule=l_dawa"],
    "per_ssl": ["strategy=per_ssl"],
}
DEFAULT = {"layer-wise", "l_dawa at the clients"}  # in others travels much the same


def rounds(grid_class, folder, *overrides, number):
    """The grid, the state and the reports after so many rounds."""
    settings = compose([*SMALL, f"output_dir={folder}", f"rounds={number}", *overrides])
    grid = grid_class(client_app, num_clients=settings.num_clients)
    federation, state, reports = build_run(grid, settings).federation, ServerState(), []
    for _ in range(number):
        state, report = run_round(WallClockExchange(grid), lambda: federation, state)
        assert not report.dropped
        reports.append(report)
    return grid, state, reports


@pytest.mark.parametrize(
    "overrides",
    [
        *(
            pytest.param([*overrides, "wire_dtype=int8"], marks=[] if name in DEFAULT else pytest.mark.heavy, id=name)
            for name, overrides in EVERY.items()
        )
    ],
)
def test_a_network_gives_numbers_and_bytes_of_one_process(overrides, tmp_path):
    number = 4 if "schedule=layer_wise" in overrides else 3 if "strategy=euc" in overrides else 2
    _, here, reports = rounds(LocalGrid, tmp_path / "a", *overrides, number=number)
    grid, there, others = rounds(NetworkGrid, tmp_path / "b", *overrides, number=number)
    assert here.models.keys() == there.models.keys()
    for name, model in here.models.items():
        assert same_bits(model.layers, there.models[name].layers)
        assert same_bits(model.broadcast, there.models[name].broadcast)
    rows, other_rows = ([row for report in some for row in report.clients] for some in (reports, others))
    for row, other, sent, received in zip(rows, other_rows, grid.sent, grid.received, strict=True):
        assert (row.bytes_up, row.bytes_down) == (other.bytes_up, other.bytes_down)
        assert row.cosine == other.cosine
        several = (
            "strategy.num_images=16" in overrides
        )  # Flower sends equal things once: models that begin alike, tables
        if row.round > 1 or not several:
            assert row.bytes_down == pytest.approx(sent[0], rel=0.02 if several else 0.01)
        assert row.bytes_up == pytest.approx(received[0], rel=0.01)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda layers: EXACT.encode(layers), "the table of layers is missing"),
        (lambda layers: Codec("fp16").encode(layers), "layers have wire_dtype=fp16 instead of int8"),
        (lambda layers: Codec("int8").encode({**layers, "spy.weight": np.ones((2, 2), "f4")}), "layer spy.weight"),
        (lambda layers: Codec("int8").encode({name: a.T for name, a in layers.items()}), "has shape"),
    ],
)
def test_an_update_in_another_encoding_is_dropped(damage, reason, tmp_path):
    federation = Federation(tmp_path, "strategy=fedavg", "wire_dtype=int8", "num_clients=3")
    grid, honest = federation.grid, federation.grid._client_app

    def app(message, context):
        reply = honest(message, context)
        if context.node_config["partition-id"] == 1:
            reply.content["arrays"] = damage(TrainPlan.from_content(message.content).layers)
        return reply

    grid._client_app = app
    federation.run(1)
    assert list(federation.report.dropped) == [1]
    assert reason in federation.report.dropped[1]
    assert "\n" not in federation.report.dropped[1]


@pytest.mark.parametrize("wire_dtype", SHORT)
def test_late_updates_are_added_to_their_start(wire_dtype):
    run = Run(3, lambda client, round: (6 if client == 2 else 1, "good"), buffered=True, min_updates=2)
    layers = {**LAYERS, "encoder.weight": np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32) * 1000}
    context = run.federation.context
    settings = replace(context.settings, wire_dtype=wire_dtype)
    context = replace(context, settings=settings, initial_layers=lambda: layers)
    run.federation = replace(run.federation, context=context)
    weight, ages = layers["encoder.weight"].astype(np.float64), set()
    for _ in range(8):
        report = run.round()
        weight = weight + np.mean([(1 + row.client) / math.sqrt(1 + row.staleness) for row in report.clients])
        np.testing.assert_allclose(run.weight, weight, atol=0.01)  # the way down alone rounds by a number or so
        ages |= {row.staleness for row in report.clients}
    assert max(ages) > 0
