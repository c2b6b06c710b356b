"""MOON: the loss by hand and in float64, what is contrasted with what, and no term without a last model."""

import math

import numpy as np
import pytest
import torch

from fedssl.errors import InputError
from fedssl.model_arrays import clone_tensors
from fedssl.regularizers.base import RegularizerInput
from fedssl.seeding import torch_generator
from fedssl.views import Views
from fedssl.wire.messages import ClientUpdate
from strategies.moon import LAST, ModelContrast, contrasted_names, model_contrastive
from tests.federation import Federation
from tests.fedssl.regularizers.made import make
from tests.methods import overrides_of
from tests.states import load_tensors


def test_the_loss_by_hand():
    # Cosines (1, 0) and (0, 1) over tau = 0.5: -log(e^2 / (e^2 + 1)) and -log(1 / (1 + e^2)).
    z, z_global, z_last = (torch.tensor(rows) for rows in ([[2.0, 0], [0, 3]], [[1.0, 0], [1, 0]], [[0.0, 1], [0, 5]]))
    expected = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(2))) / 2
    assert model_contrastive(z, z_global, z_last, temperature=0.5).item() == pytest.approx(expected, rel=1e-6)


def slow(z, z_global, z_last, *, temperature):
    def cosine(a, b):
        return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))

    terms = []
    for row, *others in zip(z, z_global, z_last, strict=True):
        near, far = (math.exp(cosine(row, other) / temperature) for other in others)
        terms.append(-math.log(near / (near + far)))  # Eq. 3
    return np.mean(terms)


def test_the_loss_equals_a_slow_transcription():
    features = np.random.default_rng(0).standard_normal((3, 7, 5))
    loss = model_contrastive(*map(torch.tensor, features), temperature=0.3)
    assert loss.item() == pytest.approx(slow(*features, temperature=0.3), rel=1e-12)


def test_the_term_compares_the_downloaded_model_with_the_last_one():
    """Three models project the views; the term is added with its weight, Eq. 4."""
    views = torch.rand(2, 6, 1, 8, 8, generator=torch_generator(0, "views"))
    models = {}
    for number, name in enumerate(("downloaded", "last", "trained")):
        models[name] = make("simclr").eval()
        with torch.no_grad():
            for parameter in models[name].parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch_generator(number)))
    z, z_global, z_last = (
        [model.projector(model.encoder(view)).detach() for view in views]
        for model in (models["trained"], models["downloaded"], models["last"])
    )
    term = ModelContrast(weight=0.7, temperature=0.3)
    term.load(clone_tensors(models["last"], contrasted_names(models["last"])))
    term.on_train_start(models["downloaded"])
    step = RegularizerInput(models["trained"], Views.of(*views), tuple(z), torch_generator(0))
    expected = 2 + 0.7 * slow(*(torch.cat(one).double().numpy() for one in (z, z_global, z_last)), temperature=0.3)
    assert term.apply(torch.tensor(2.0), step).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("method", ["simclr", "byol"])
def test_the_first_round_and_no_weight_are_federated_averaging(tmp_path, method):
    average = Federation(tmp_path / "average", "strategy=fedavg", f"method={method}")
    moon = Federation(tmp_path / "moon", "strategy=moon", f"method={method}")
    flat = Federation(tmp_path / "flat", "strategy=moon", "strategy.weight=0", f"method={method}")
    for federation in (average, moon, flat):
        federation.run(1)
    assert all((moon.layers[name] == layer).all() for name, layer in average.layers.items())
    first = load_tensors(tmp_path / "moon" / "clients" / "0000" / "0", before=2)
    assert {name.removeprefix(LAST).partition(".")[0] for name in first if LAST in name} == {"encoder", "projector"}
    kept = load_tensors(tmp_path / "flat" / "clients" / "0000" / "0", before=2) if method == "byol" else {}
    assert not [name for name in kept if LAST in name]
    assert (tmp_path / "flat" / "clients").exists() == (method == "byol")  # whose target network stays
    for federation in (average, moon, flat):
        federation.run(1)
    assert all((flat.layers[name] == layer).all() for name, layer in average.layers.items())
    assert any((moon.layers[name] != layer).any() for name, layer in average.layers.items())


def test_methods_without_whole_views_are_refused(tmp_path):
    message = "the strategy's term needs the encoder's output .* set strategy=fedavg, or another"
    with pytest.raises(InputError, match=message):
        Federation(tmp_path, "strategy=moon", *overrides_of("mae"))
    with pytest.raises(InputError, match="Alignment needs that of the encoder and the strategy's term"):
        Federation(tmp_path, "strategy=moon", "regularizer=alignment")


def test_with_equal_models_the_term_is_log_2(tmp_path):
    """Both cosines are then equal."""
    federation = Federation(tmp_path, "strategy=moon", "optimizer.lr=0")
    federation.run(1)
    first = federation.report.clients[0].loss
    federation.run(1)
    assert isinstance(federation.strategy.client.term, ModelContrast)
    assert federation.report.clients[0].loss == pytest.approx(first + math.log(2), abs=0.2)


def test_a_client_contrasts_its_own_last_model(tmp_path, monkeypatch):
    """In round 2 each client loads what it has uploaded in round 1."""
    federation, loaded, load = Federation(tmp_path, "strategy=moon"), [], ModelContrast.load
    monkeypatch.setattr(ModelContrast, "load", lambda term, last: (loaded.append(last), load(term, last))[1])
    federation.run(2)
    updates = [ClientUpdate.from_content(content, 0) for content in federation.updates]
    number = len(updates) // 2
    assert number > 1
    assert loaded[:number] == [{}] * number
    # Clients have an equal order in all rounds.
    for last, update in zip(loaded[number:], updates[:number], strict=True):
        weights = [name for name in last if name in update.layers]
        assert len(weights) > 3
        assert all(np.array_equal(last[name].numpy(), update.layers[name]) for name in weights)
