"""The worker's model between two clients: what one client uploads is moved out, and the next one has to load it."""

from collections import namedtuple

import pytest
import torch

from client_app import worker
from fedssl.config.load import compose
from fedssl.datasets.images import TensorImages
from fedssl.methods.base import SSLMethod, build_method
from fedssl.model_arrays import (
    check_loaded,
    exchanged_layers,
    exchanged_names,
    load_and_start_round,
    load_layers,
    local_names,
    move_layers_out,
)
from fedssl.seeding import torch_generator
from fedssl.training import LocalTrainer, train
from strategies.base import ClientStrategy
from tests.federation import Federation

SMALL = ["encoder.width=4", "batch_size=4", "local_epochs=1"]
MOVED_OUT = "were moved out of the model; load them before it is used"


def make(*overrides):
    settings = compose([*SMALL, *overrides])
    method = build_method(settings.model)
    images = torch.randint(256, (8, 1, 28, 28), dtype=torch.uint8, generator=torch_generator(0, "images"))
    training = LocalTrainer.build(settings.training, method)
    return method, lambda: train(
        method, TensorImages(images), torch.arange(8), training=training, generator=torch_generator(0)
    )


def test_moving_copies_nothing():
    method, _ = make()
    address = method.named_tensors["encoder.blocks.0.0.weight"].data_ptr()
    layers = move_layers_out(method, exchanged_names(method))
    assert layers["encoder.blocks.0.0.weight"].ctypes.data == address


def test_a_model_is_used_with_all_layers_loaded_only():
    method, run = make()
    expected = exchanged_layers(method)
    layers = move_layers_out(method, exchanged_names(method))
    *most, last = layers
    for names in ([], most):
        load_layers(method, {name: layers[name] for name in names})
        for use in (run, lambda: check_loaded(method, [last])):
            with pytest.raises(RuntimeError, match=MOVED_OUT):
                use()
    load_layers(method, {last: layers[last]})
    assert all((array == expected[name]).all() for name, array in exchanged_layers(method).items())
    run()


def test_local_parts_that_a_first_round_initializes_are_loaded():
    """FedU may upload the target encoder. It is initialized from the online one at a client's first participation."""
    method, run = make("method=byol")
    online = exchanged_layers(method)
    move_layers_out(method, [*online, *local_names(method)])
    load_and_start_round(method, online)
    target = {name.removeprefix("target_"): method.named_tensors[name].numpy() for name in local_names(method)}
    assert target.keys() > {name for name in online if name.startswith("encoder.")}
    assert all((target[name] == online[name]).all() for name in target)
    run()


def test_the_upload_is_read_after_the_end_of_the_round(tmp_path, monkeypatch):
    def fill(method):
        with torch.no_grad():
            for parameter in method.encoder.parameters():
                parameter.fill_(7)

    monkeypatch.setattr(SSLMethod, "end_round", fill)
    uploaded = Federation(tmp_path, *SMALL, "strategy=fedavg").run(1)  # the mean of equal models
    assert (uploaded["encoder.blocks.0.0.weight"] == 7).all()


def test_the_method_has_the_round_and_the_number_of_rounds(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(SSLMethod, "start_round", lambda self, *, first: seen.append((self.round, self.rounds)))
    Federation(tmp_path, *SMALL, "strategy=fedavg", "num_clients=2", "rounds=7").run(2)
    assert seen == [(1, 7), (1, 7), (2, 7), (2, 7)]


def test_a_strategy_that_forgets_to_load_the_model_is_reported(tmp_path, monkeypatch):
    """The first client trains the model as it was built, the others what a client before them has left."""
    monkeypatch.setattr(ClientStrategy, "load_start", lambda self, method, plan, state: plan.layers)
    federation = Federation(tmp_path, *SMALL, "num_clients=3", "aggregation.min_updates=1")
    federation.run(1)
    assert len(federation.report.clients) == 1
    assert all(MOVED_OUT in reason for reason in federation.report.dropped.values())
    assert len(federation.report.dropped) == 2


def test_another_worker_is_released_before_the_next_is_built(monkeypatch):
    """Both need memory for images and a model. Images that have changed are read again."""
    forgotten = []
    monkeypatch.setattr(worker, "_workers", {})
    made = namedtuple("Worker", ["settings", "others", "failed_files"])
    monkeypatch.setattr(worker, "ClientWorker", lambda settings: made(settings, dict(worker._workers), ()))
    monkeypatch.setattr(worker, "forget_images", lambda: forgotten.append(True))
    first = worker.worker_for("a")
    assert worker.worker_for("a") is first
    assert worker.worker_for("b") == ("b", {}, ())
    assert not forgotten
    changed = worker.worker_for("b", images="1")
    assert worker.worker_for("b", images="1") is changed
    assert changed == ("b", {}, ())
    assert len(forgotten) == 1
