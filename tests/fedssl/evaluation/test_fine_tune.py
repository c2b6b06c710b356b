"""Fine-tuning on a share of the labels."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedssl.config.load import compose
from fedssl.datasets.images import TensorImages
from fedssl.errors import InputError
from fedssl.evaluation.few_labels import FewLabels
from fedssl.evaluation.fine_tune import FineTune
from fedssl.evaluation.labeled_images import LabeledImages
from fedssl.evaluation.protocol import evaluate
from fedssl.evaluation.sampling import stratified_sample
from tests.fedssl.evaluation.made import halves


class Halves(nn.Module):
    """Mean brightness of the upper and the lower half, each times a weight."""

    def __init__(self, *weights):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weights))

    def forward(self, images):
        return torch.stack([half.mean(dim=(1, 2, 3)) for half in images.chunk(2, dim=2)], 1) * self.weight


class Brightness(Halves):
    """The same, normalized."""

    def __init__(self, *weights):
        super().__init__(*weights)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, images):
        return self.norm(super().forward(images))


class Sum(Brightness):
    """The sum of both, which is independent of the class if the weights are equal."""

    def forward(self, images):
        return super().forward(images).sum(dim=1, keepdim=True)


def protocol(**changes):
    options = {
        "name": "fine_tune",
        "shares": [0.1, 1.0],
        "draws": 2,
        "epochs": 10,
        "batch_size": 16,
        "optimizer": torch.optim.SGD,
        "encoder_lr": 0.01,
        "head_lr": 0.3,
        "lr_schedule": None,
        "transform": None,
        "view": {},
    }
    return FineTune(**{**options, **changes})


def test_a_share_of_every_class_is_drawn():
    labels = torch.tensor([0] * 40 + [1] * 10 + [2] * 2)
    rows = stratified_sample(labels, share=0.25, generator=np.random.default_rng(0))
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert torch.bincount(labels[rows]).tolist() == [10, 2, 1]  # a quarter of 10 is rounded to 2, of 2 to none: one
    assert stratified_sample(labels, share=1.0, generator=np.random.default_rng(0)).tolist() == list(range(52))


def test_a_copy_of_the_encoder_is_trained():
    encoder = Brightness(1.0, 1.0)
    before = copy.deepcopy(encoder.state_dict())
    result = evaluate(protocol(), halves(encoder, 60), seed=0)
    assert list(result) == ["fine_tune_10_percent", "fine_tune_100_percent"]
    assert result["fine_tune_100_percent"].value == 1
    assert result["fine_tune_10_percent"].std is not None
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert encoder.training
    assert evaluate(protocol(), halves(Brightness(1.0, 1.0), 60), seed=0) == result


def test_the_encoder_learns_as_well():
    """The sum of both halves is the same for both classes until the encoder learns different weights."""
    protocols = (protocol(encoder_lr=lr, shares=[1.0], draws=1, epochs=30) for lr in (0.0, 0.3))
    frozen, trained = (evaluate(one, halves(Sum(1.0, 1.0), 60), seed=0) for one in protocols)
    assert frozen["fine_tune_100_percent"].value < 0.7
    assert trained["fine_tune_100_percent"].value > 0.9


def test_three_epochs_with_two_rates_and_the_cosine_by_hand():
    """One batch per epoch. In float64: the gradient of the mean cross-entropy, momentum 0.9, rates (1, 3/4, 1/4)."""
    changes = ["epochs=3", "shares=[1]", "encoder_lr=0.2", "head_lr=0.5", "view.crop_scale=[1,1]", "view.flip_prob=0"]
    overrides = ["evaluation=fine_tune", *(f"evaluation.{change}" for change in changes)]
    fine_tuning = compose(overrides).evaluation.protocol.instantiate()
    made, make = [], fine_tuning.optimizer
    fine_tuning.optimizer = lambda groups: made.append(make(groups)) or made[-1]
    given = halves(Halves(1.0, 0.5), 60)
    evaluate(fine_tuning, given, seed=0)
    x = (Halves(1.0, 1.0)(given.train.images[:] / 255 - 0.5) / 0.5).detach().double().numpy()
    w, weight, bias = np.array([1.0, 0.5]), np.zeros((2, 2)), np.zeros(2)  # of the encoder and the classifier
    velocities = [0.0, 0.0, 0.0]
    for factor in (1, 0.75, 0.25):  # (1 + cos(pi e / 3)) / 2
        exponentials = np.exp(x * w @ weight.T + bias)
        d = (exponentials / exponentials.sum(axis=1, keepdims=True) - np.eye(2)[given.train.labels]) / 60
        gradients = ((d @ weight) * x).sum(axis=0), d.T @ (x * w), d.sum(axis=0)
        velocities = [0.9 * velocity + gradient for velocity, gradient in zip(velocities, gradients, strict=True)]
        for values, rate, velocity in zip((w, weight, bias), (0.2, 0.5, 0.5), velocities, strict=True):
            values -= factor * rate * velocity
    (optimizer,) = made
    found = [p.detach().numpy() for group in optimizer.param_groups for p in group["params"]]
    for one, expected in zip(found, (w, weight, bias), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-6)


def test_colors_of_multispectral_images_are_rejected():
    images = LabeledImages(TensorImages(torch.zeros(4, 5, 4, 4, dtype=torch.uint8)), torch.arange(4) % 2)
    given = replace(halves(Brightness(1.0, 1.0), 60), train=images, test=images, mean=(0.5,) * 5, std=(0.5,) * 5)
    with pytest.raises(InputError, match="5 channels but hue of views need 3 .*; set evaluation.view.hue=0$"):
        evaluate(protocol(view={"hue": 0.1, "saturation": 0.0}), given, seed=0)


def test_a_linear_probe_on_shares():
    few = FewLabels(labels_per_class=[], shares=[0.1, 0.5], draws=3)
    result = evaluate(few, halves(Brightness(1.0, 1.0), 60), seed=0)
    assert list(result) == ["linear_10_percent", "linear_50_percent"]
    assert result["linear_50_percent"].value == 1


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["evaluation.shares=[0]"], r"evaluation.shares=\[0\] must be a list of numbers above 0 and at most 1; the"),
        (["evaluation.draws=0"], "evaluation.draws=0 must be an integer of at least 1; the default is 1"),
        (["evaluation.batch_size=1"], "evaluation.batch_size=1 must be an integer of at least 2; the default is 128"),
        (["evaluation.encoder_lr=-1"], "evaluation.encoder_lr=-1 must be a number of at least 0; the default is 0.001"),
    ],
)
def test_invalid_settings_are_one_sentence(overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        compose(["evaluation=fine_tune", *overrides]).evaluation.protocol.instantiate()


def test_subsets_of_the_test_images_share_one_training(monkeypatch):
    trainings = []
    fit = FineTune.fit
    monkeypatch.setattr(FineTune, "fit", lambda *args, **options: trainings.append(1) or fit(*args, **options))
    whole, fine_tuning = halves(Brightness(1.0, 1.0), 60), protocol(epochs=1, shares=[0.1], draws=1)
    evaluate(fine_tuning, whole, seed=0)
    predicted = next(iter(whole._predictions.values()))
    for rows in (torch.tensor([0, 1, 5]), torch.tensor([2, 8])):
        score = evaluate(fine_tuning, whole.subset(rows), seed=0)["fine_tune_10_percent"]
        assert score.value == (predicted[rows] == whole.test.labels[rows]).double().mean()
    assert len(trainings) == 1
    evaluate(fine_tuning, whole, seed=1)
    assert len(trainings) == 2
