"""Copies and waits of a round on an accelerator: their numbers do not depend on layers, images and steps.

A round of a client has one copy of parameters per dtype and direction: float32, and int64 of batch normalization. In
an epoch the host never waits, and copies once the order of the images and once the parameters of the views.
"""

from collections import Counter
from pathlib import Path

import pytest

from server_app.models import load_each
from tests.accelerator.device import recorded
from tests.cases import some
from tests.federation import Federation
from tests.methods import MASKED, METHODS, overrides_of

CLIENTS, EPOCHS = 2, 2
BASE = ["dataset=digits", f"num_clients={CLIENTS}", f"local_epochs={EPOCHS}", "batch_size=8"]  # 4 steps per epoch
BASE += ["measure_resources=false", "collapse_images=0", "evaluate_every=0"]
VIT = ["encoder=vit_tiny", "encoder.patch=4", "encoder.width=16", "encoder.depth=2", "encoder.heads=2"]
TRANSFER, TRAIN = "fedssl/machine/device_copies.py", "fedssl/training.py:train"
DATA = "fedssl/machine/devices.py:to_device"
SETUP = ("client_app/worker.py:ClientWorker.__init__", "fedssl/methods/base.py:SSLMethod._apply")
PARAMETERS = {("to_device", f"{TRANSFER}:copy_from_cpu"): 2}
PARAMETERS |= {(name, f"{TRANSFER}:copy_to_cpu"): 2 for name in ("to_host", "synchronize")}
PLAIN = {**PARAMETERS, ("to_device", DATA): 2 * EPOCHS, ("synchronize", TRAIN): 1}  # the loss
WITH_MASKS = {**PLAIN, ("to_device", DATA): 3 * EPOCHS}  # masks are a third copy per epoch
WITHOUT_INTEGERS = ("ijepa", "mae", "mar")  # no batch normalization, whose counter is int64
SETTINGS = {
    "stages": [*VIT, "schedule=layer_wise", "rounds=2", "method=moco_v3"],
    "clipped": ["clip_norm=0.1"],
    "adam": ["optimizer=adam"],
    "adamw": ["optimizer=adamw", "precision=bf16"],
    **{f"regularizer {name}": [f"regularizer={name}"] for name in ("alignment", "decorr", "fur", "prox")},
    **{name: [f"strategy={name}", "method=byol"] for name in ("eua", "euc", "fedbn", "fedema", "fedu", "gossip")},
    **{name: [f"strategy={name}", "method=byol"] for name in ("l_dawa_fedu", "local_only")},
    "wire": ["wire_dtype=int8"],
    "server optimizer": ["server_optimizer=fedadam"],
}

DEFAULT = ("stages", "fedu")


def events_of_rounds(folder: str, overrides: list[str]) -> list[Counter]:
    """Return the events of two rounds by kind and function: all clients' first one, and one with client states."""
    federation, rounds = Federation(Path(folder), *BASE, *overrides), []
    for _ in range(2):
        with recorded() as events:
            federation.run(1)
        rounds.append(Counter((event.kind, event.site) for event in events if event.caller not in SETUP))
    return rounds


def per_client(events: Counter) -> dict:
    assert not any(number % CLIENTS for number in events.values())
    return {key: number // CLIENTS for key, number in events.items()}


@pytest.mark.parametrize("method", some(METHODS, default=("simclr", "moco_v3", "ibot", "mae")))
def test_parameters_cross_once_per_dtype_and_direction(accelerator, method, tmp_path):
    first, second = accelerator(events_of_rounds, str(tmp_path), [*overrides_of(method), "strategy=fedavg"]).result()
    masks = {("synchronize", "fedssl/methods/fedca.py:FedCA.start_round"): 1} if method == "fedca" else {}
    usual = PLAIN if method not in MASKED else WITH_MASKS
    usual = usual | (dict.fromkeys(PARAMETERS, 1) if method in WITHOUT_INTEGERS else {})
    if method == "swav":  # and the prototypes, of which clients change the length when they start
        usual = usual | dict.fromkeys((key for key in PARAMETERS if "to_cpu" in key[1]), 3)
    # One copy per step, of directions or of the teacher's features.
    per_step = {("to_device", DATA): (2 + 4) * EPOCHS} if method in ("distillation", "lejepa") else {}
    assert per_client(second) == usual | masks | per_step
    # The method's server side reads its untrained parts once.
    server = 2 if method in ("distillation", "fedca", "fedsc", "mar", "orchestra") else 0
    for key in PARAMETERS:
        assert first[key] == CLIENTS * usual[key] + (server if "to_cpu" in key[1] else 0)


@pytest.mark.parametrize("name", some(SETTINGS, default=DEFAULT))
def test_settings_need_no_further_copy(accelerator, name, tmp_path):
    _, second = accelerator(events_of_rounds, str(tmp_path), SETTINGS[name]).result()
    assert per_client(second) == PLAIN


@pytest.mark.heavy
def test_a_personalized_model_is_trained_by_as_many_copies_again(accelerator, tmp_path):
    _, second = accelerator(events_of_rounds, str(tmp_path), ["strategy=per_ssl", "method=byol"]).result()
    twice = {key: 2 * number for key, number in PLAIN.items()}
    reference = {("to_device", f"{TRANSFER}:copy_from_cpu"): 2 + 2 + 1}  # trained parameters have one dtype
    assert per_client(second) == twice | reference


@pytest.mark.heavy
def test_more_layers_and_steps_need_no_further_copy(accelerator, tmp_path):
    many = [*VIT, "encoder.depth=7", "batch_size=4", "strategy=fedavg"]
    _, second = accelerator(events_of_rounds, str(tmp_path), many).result()
    assert per_client(second) == PLAIN


def evaluation_events(folder: str) -> list[Counter]:
    """Return the events of the evaluation of one model, and those of its collapse metrics."""
    words = ["evaluate_every=1", "evaluation=knn", "collapse_images=8", "dataset.limit=300"]
    federation = Federation(Path(folder), *BASE, *words)
    components, layers, counts = federation.components, federation.run(1), []

    def evaluate():
        components.evaluator.evaluate(load_each(federation.method, {"global": layers}))

    for measure in (evaluate, lambda: components.monitor.observe(0, layers)):
        with recorded() as events:
            measure()
        counts.append(Counter((event.kind, event.site) for event in events))
    return counts


def test_evaluation_loads_parameters_once_per_dtype(accelerator, tmp_path):
    evaluation, monitor = accelerator(evaluation_events, str(tmp_path)).result()
    load, extract = ("to_device", f"{TRANSFER}:copy_from_cpu"), "fedssl/evaluation/features.py:extract"
    images = evaluation.pop(("to_device", DATA))  # a copy for each batch of images, without waiting
    assert images < 10
    assert evaluation == {load: 2, ("to_host", extract): 2, ("synchronize", extract): 2}  # training and test images
    assert monitor.pop(("to_device", DATA)) < 10
    views = "fedssl/evaluation/collapse_metrics.py:CollapseMetrics.measure"
    waits = {("to_host", extract): 2, ("synchronize", extract): 2, ("to_host", views): 1, ("synchronize", views): 1}
    assert monitor == {load: 2, **waits}
