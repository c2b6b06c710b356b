"""Training on images of the server, of which `tests/fedssl/schedule` has the rounds and the stages."""

import numpy as np
import torch

from strategies.mods import calibration
from strategies.types import GLOBAL
from tests.federation import Federation


def test_calibration_has_no_regularizer(tmp_path):
    """Clients that do not train return what they got: all that changes comes from the server's images."""
    overrides = ["strategy=fedavg", "calibration=auxiliary", "calibration.epochs=1", "rounds=1", "local_epochs=0"]
    plain, regularized = (
        Federation(tmp_path / name, *overrides, f"regularizer={name}").run(1) for name in ("none", "fur")
    )
    weight = "encoder.blocks.0.0.weight"
    np.testing.assert_array_equal(regularized[weight], plain[weight])


def test_calibration_has_what_the_server_sends_to_clients(tmp_path, monkeypatch):
    dictionary = ["method=fedca", "method.sent_per_round=4", "method.dictionary_capacity=12"]
    federation, seen = Federation(tmp_path, *dictionary, "strategy=fedavg", "calibration=auxiliary"), []
    monkeypatch.setattr(calibration, "train", lambda method, *_, **__: seen.append(method.dictionary.clone()))
    federation.run(1)
    assert torch.equal(seen[0], torch.from_numpy(federation.state.models[GLOBAL].broadcast["dictionary"]))
    assert seen[0].any(dim=1).all()
