"""What clients would use themselves: who shows what, and what it is worth."""

import json
import weakref

import numpy as np
import pytest
import torch

from client_app import worker
from fedssl.errors import InputError
from fedssl.export import load_encoder
from fedssl.seeding import derive_seed
from fedssl.wire.messages import PersonalizedModelRequest
from server_app.callbacks import personalized
from server_app.callbacks.personalized import (
    PARTICIPANTS,
    UNSEEN,
    UNSEEN_ADAPTED,
    evaluate_personalized,
    request_personalized_encoders,
)
from server_app.messaging import ClientMessenger
from server_app.plans import PlanBuilder
from simulation.run import run
from strategies import cluster_assignment
from strategies.fedbn import batch_norm_names
from strategies.types import GLOBAL
from tests.federation import Federation
from tests.runs import read_summary

JUDGED = ["evaluate_personalized=true", "final_evaluation=knn", "dataset.limit=200"]
THREE = ["num_clients=3", "partition=iid", *JUDGED]
NEW = ["num_clients=4", "clients_per_round=2", "unseen_clients=1", *JUDGED]


def encoders(federation, clients, ask=None):
    messenger, request = ClientMessenger(federation.grid), ask or PersonalizedModelRequest()
    found = request_personalized_encoders(messenger, federation.components, federation.state, clients, request)
    return {client: (name, layers) for client, name, layers in found}


def equal(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


def test_under_averaging_all_use_the_global_model(tmp_path):
    federation = Federation(tmp_path, "strategy=fedavg", *NEW)
    federation.run(2)
    model = federation.state.models[GLOBAL].layers
    found = encoders(federation, [0, 1, 2, 3])
    assert all(name == GLOBAL and equal(layers, model) for name, layers in found.values())
    adapted = encoders(federation, [3], PersonalizedModelRequest(adaptation_epochs=1, after_adaptation=True))[3][1]
    assert not equal(adapted, model)
    assert equal(encoders(federation, [3], PersonalizedModelRequest(adaptation_epochs=1))[3][1], model)
    assert equal(
        adapted, encoders(federation, [3], PersonalizedModelRequest(adaptation_epochs=1, after_adaptation=True))[3][1]
    )  # nothing was kept
    judged = evaluate_personalized(
        ClientMessenger(federation.grid), federation.components, federation.state, trained={0, 1, 2}, epochs=1
    )
    participants = [(client, PARTICIPANTS) for client in range(3)]
    assert [(one.client, one.group) for one in judged] == [*participants, (3, UNSEEN), (3, UNSEEN_ADAPTED)]
    assert len({one.global_test["knn"] for one in judged[:4]}) == 1
    assert len({one.local_test["knn"] for one in judged[:3]}) > 1


@pytest.mark.parametrize("strategy", ["fedavg", "fedbn"])
def test_of_an_average_over_rounds_clients_use_what_is_evaluated(tmp_path, strategy):
    """FedBN's clients combine it with the batch norm of their last training."""
    average = ["model_average=last", "model_average.rounds=2", "optimizer.lr=0.3"]
    federation = Federation(tmp_path, f"strategy={strategy}", *average, *NEW, "clients_per_round=3")
    federation.run(2)
    model = federation.state.models[GLOBAL]
    kept = batch_norm_names(federation.components.method) if strategy == "fedbn" else []
    found = encoders(federation, [0, 1, 3])
    for client, (_, layers) in found.items():
        for name in (name for name, layer in layers.items() if layer.dtype.kind == "f"):
            is_own = client != 3 and name in kept
            assert np.array_equal(layers[name], model.evaluated[name]) != is_own
    assert any(not np.array_equal(layer, model.layers[name]) for name, layer in found[3][1].items())


@pytest.mark.parametrize(
    ("overrides", "most_dimensions"),
    [(["strategy=fedbn"], 1), (["strategy=fedema", "method=byol"], 4)],  # what of normalisations is no kernel
)
def test_clients_show_what_stays_with_them(tmp_path, overrides, most_dimensions):
    federation = Federation(tmp_path, *overrides, *THREE)
    federation.run(2)
    (_, one), (_, other) = (encoders(federation, [client])[client] for client in (0, 1))
    assert max(one[name].ndim for name in one if not np.array_equal(one[name], other[name])) == most_dimensions


def test_a_newcomer_among_clusters_chooses_by_what_it_learns_first(tmp_path, monkeypatch):
    federation = Federation(tmp_path, "strategy=featarc", "strategy.num_images=16", *NEW)
    federation.run(1)
    learned = []  # whether the client had an encoder of its own when it chose
    original = cluster_assignment.SelectByFeatures.select_model

    def choose(half, method, plans, state, local_data):
        learned.append(any(name.startswith(cluster_assignment.LAST_ENCODER_PREFIX) for name in state or {}))
        return original(half, method, plans, state, local_data)

    monkeypatch.setattr(cluster_assignment.SelectByFeatures, "select_model", choose)
    name, layers = encoders(federation, [3], PersonalizedModelRequest(adaptation_epochs=1))[3]
    assert learned == [False, True]
    model = federation.state.models.get(name, federation.components.context.initial_model())
    assert equal(layers, model.layers)


def test_a_newcomer_adapts_as_clients_train(tmp_path, monkeypatch):
    """It has its own seeds, and its target network is a copy of the online one."""
    federation = Federation(tmp_path, "strategy=featarc", "method=byol", "method.target_init=reset", *NEW)
    federation.run(2)
    starts, train = [], worker.ClientWorker._train

    def observed(self, *args):
        method = self.method
        target = all(
            map(torch.equal, method.encoder.state_dict().values(), method.target_encoder.state_dict().values())
        )
        starts.append((torch.initial_seed(), target))
        return train(self, *args)

    monkeypatch.setattr(worker.ClientWorker, "_train", observed)
    adapt = PersonalizedModelRequest(adaptation_epochs=1, after_adaptation=True)
    encoders(federation, [0], adapt)
    encoders(federation, [3], adapt)
    path = (federation.settings.seed, "own", 3)
    expected = [
        derive_seed(*path, 0, "first"),
        derive_seed(*path, 0),
        derive_seed(*path, 3, "first"),
        derive_seed(*path, 3),
    ]
    assert starts == [(seed, True) for seed in expected]


@pytest.mark.parametrize(("strategy", "expected"), [("local_only", [2, 2, 1]), ("fedavg", [5])])
def test_models_of_single_clients_are_requested_in_batches(tmp_path, monkeypatch, strategy, expected):
    """Free the plans of a batch before the next one; the encoders equal those of single requests."""
    federation = Federation(tmp_path, f"strategy={strategy}", "num_clients=5", "clients_per_round=2", *JUDGED)
    federation.run(2)
    single = {client: encoders(federation, [client])[client] for client in range(5)}
    sizes, built = [], []

    class Recorded(PlanBuilder):
        def __init__(self, *args, candidates, **options):
            assert all(earlier() is None for earlier in built)
            sizes.append(len(candidates))
            built.append(weakref.ref(self))
            super().__init__(*args, candidates=candidates, **options)

    monkeypatch.setattr(personalized, "PlanBuilder", Recorded)
    found = encoders(federation, range(5))
    assert sizes == expected
    assert list(found) == list(range(5))
    for client, (name, layers) in found.items():
        assert name == single[client][0]
        assert equal(layers, single[client][1])


def test_in_the_run_folder(tmp_path):
    overrides = ["num_clients=3", "clients_per_round=2", "unseen_clients=1", *JUDGED, "rounds=2", "local_epochs=1"]
    overrides += ["encoder.width=4", "threads=1", "engine=local", "evaluate_every=0", "partition.alpha=0.5"]
    run([*overrides, f"output_dir={tmp_path / 'run'}"])
    found = json.loads((tmp_path / "run" / "personalized.json").read_text())
    summary = read_summary(tmp_path / "run")
    assert found["means"] == summary["personalized"]
    assert found["means"][PARTICIPANTS]["knn"] == pytest.approx(summary["final"]["federated"]["knn"])
    judged = {(row["client"], row["group"]) for row in found["clients"]}
    assert judged == {(0, PARTICIPANTS), (1, PARTICIPANTS), (2, UNSEEN), (2, UNSEEN_ADAPTED)}
    assert all(0 < row["local_test_images"]["knn"] < summary["test_images"]["knn"] for row in found["clients"])
    own = [row["local_test"]["knn"] for row in found["clients"] if row["group"] == PARTICIPANTS]
    assert found["means"][f"{PARTICIPANTS}, local test"]["knn"] == pytest.approx(sum(own) / 2)
    assert isinstance(load_encoder(tmp_path / "run" / "encoder.pt"), torch.nn.Module)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["unseen_clients=3"], "unseen_clients=3 of num_clients=3 never train; lower unseen_clients"),
        (
            ["unseen_clients=2"],
            "clients_per_round=3 but unseen_clients=2 of num_clients=3 never train; set clients_per_round=1",
        ),
        (["unseen_clients=-1"], "unseen_clients=-1 must be an integer of at least 0; the default is 0"),
        (
            ["evaluate_personalized=true", "dataset.splits.test=null"],
            "evaluate_personalized=true needs labels; the data set has",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(tmp_path, overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        Federation(tmp_path, *overrides)
