"""Training on images of the server, of which `tests/fedssl/schedule` has the rounds and the stages."""

import re

import numpy as np
import pytest
import torch

from fedssl.errors import InputError
from fedssl.partition import server_indices
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


def test_calibration_has_a_batch_of_its_method(tmp_path):
    """BYOL learns from three images or more, SimCLR from two."""
    words = ["dataset.limit=80", "strategy=fedavg", "calibration=auxiliary", f"calibration.share={2 / 80}"]
    Federation(tmp_path / "simclr", *words, "method=simclr")
    with pytest.raises(InputError, match=r"gives the server 2, but .* at least 3; set calibration.share=") as error:
        Federation(tmp_path / "byol", *words, "method=byol")
    remedy = re.findall(r"calibration.share=\S+$", str(error.value))
    Federation(tmp_path / "byol", *words, "method=byol", *remedy)


@pytest.mark.parametrize(
    ("images", "remedy"), [(9, "set calibration.share=0.34"), (2, "add images"), (0, "add images")]
)
def test_a_share_without_enough_images_has_a_remedy(images, remedy):
    """Three of nine images are a share of 0.333, or 0.34 when rounded up."""
    with pytest.raises(InputError, match=f"needs at least 3; {remedy}$"):
        server_indices(images, share=0.1, seed=0, min_images=3)
    assert len(server_indices(9, share=0.34, seed=0, min_images=3)) == 3
