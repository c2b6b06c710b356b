"""The images by which a client tells models apart: the same at every call, also where stages are frozen."""

import pytest
import torch

from client_app.local_data import LocalDataSample
from fedssl.config.load import compose
from fedssl.datasets.base import load_federated
from fedssl.errors import RequestRefused
from fedssl.methods.base import build_method
from fedssl.schedule.stages import set_active_stages
from fedssl.training import LocalTrainer

WORDS = ["dataset.limit=60", "encoder.width=4", "batch_size=16"]


def sample(*overrides, seed_path=(0, "choose", 1, 2), on_step_start=lambda: None):
    settings = compose([*WORDS, *overrides])
    method = build_method(settings.model)
    images = load_federated(settings.data)
    labels = images.labels if method.uses_labels else None
    made = LocalDataSample(
        images.images,
        torch.arange(10, 50),
        data=settings.data,
        training=LocalTrainer.build(settings.training, method),
        seed_path=seed_path,
        labels=labels,
        on_step_start=on_step_start,
    )
    return made, method


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("name", ["simclr", "byol", "supervised"])
def test_calls_see_the_same(name, frozen):
    images, method = sample(f"method={name}")
    with set_active_stages(method, depth=3, frozen=frozen):
        losses = {images.loss(method, 24) for _ in range(3)}
        assert len(losses) == 1
        one, other = (images.features(method, 24) for _ in range(2))
        assert one.shape == (24, method.encoder.feature_dim)
        assert one.equal(other)
        assert method.encoder.active_stages.frozen == frozen


def test_the_loss_is_the_mean_over_images(monkeypatch):
    """40 images in batches of 14, 13 and 13. A loss equal to the batch size is (14^2 + 13^2 + 13^2) / 40 on average."""
    images, method = sample()
    monkeypatch.setattr(method, "loss", lambda views: torch.tensor(float(views.num_images)))
    assert images.loss(method, 40) == pytest.approx(534 / 40)


def test_what_limits_training_limits_choosing():
    calls = []

    def clock():
        calls.append(1)
        if len(calls) > 3:
            raise RequestRefused("the time is up")

    images, method = sample(on_step_start=clock)
    images.loss(method, 40)  # three batches
    with pytest.raises(RequestRefused, match="the time is up"):
        images.features(method, 8)
