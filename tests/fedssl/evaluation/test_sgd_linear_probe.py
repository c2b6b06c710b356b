"""The papers' linear probes: training against slow transcriptions, batch norm, features and settings files."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedssl.config.load import compose
from fedssl.datasets.images import TensorImages
from fedssl.encoders import conv_small
from fedssl.errors import InputError
from fedssl.evaluation.classifier import AugmentedViews, warmup_cosine
from fedssl.evaluation.features import Features
from fedssl.evaluation.labeled_images import LabeledImages
from fedssl.evaluation.linear_probe import LinearProbe
from fedssl.evaluation.protocol import EvaluationInput, evaluate, make_evaluation_input
from fedssl.evaluation.sampling import stratified_sample
from fedssl.evaluation.scores import Score
from fedssl.evaluation.sgd_linear_probe import SGDLinearProbe
from fedssl.seeding import numpy_generator
from tests.fedssl.evaluation.made import halves

CPU = torch.device("cpu")


def protocol(**changes):
    options = {
        "name": "mine",
        "shares": [1.0],
        "features": "pooled",
        "batch_norm_epochs": 0,
        "epochs": 5,
        "batch_size": 16,
        "optimizer": lambda groups: torch.optim.SGD(groups, lr=0.3),
        "lr_schedule": None,
        "transform": None,
        "view": {},
    }
    return SGDLinearProbe(**{**options, **changes})


class Halves(nn.Module):
    """Mean brightness of both halves, normalized and rectified; counts its images."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2, momentum=0.9)
        self.seen = [0]  # one list for all copies

    def __deepcopy__(self, memo):
        result = Halves()
        result.load_state_dict(self.state_dict())
        result.seen = self.seen
        return result

    def forward(self, images):
        self.seen[0] += len(images)
        return self.norm(torch.stack([half.mean(dim=(1, 2, 3)) for half in images.chunk(2, dim=2)], 1)).relu()


def slow_sgd(x, labels, *, classes, rates, momentum, nesterov):
    """Gradient steps on the mean cross-entropy of all images in float64, one for each rate; weight and bias."""
    x, n = np.hstack([x, np.ones((len(x), 1))]), len(x)
    w, v = np.zeros((classes, x.shape[1])), np.zeros((classes, x.shape[1]))
    for rate in rates:
        scores = x @ w.T
        shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        gradient = (shares - np.eye(classes)[labels]).T @ x / n
        v = momentum * v + gradient
        w = w - rate * (gradient + momentum * v if nesterov else v)
    return w[:, :-1], w[:, -1]


def test_training_is_the_gradient_steps_of_the_paper():
    """L-DAWA's optimizer and learning rates, with one batch per epoch."""
    overrides = ["evaluation.lr_schedule.milestones=[2,3]", "evaluation.epochs=4", "evaluation.batch_size=30"]
    made = compose(["evaluation=l_dawa/linear", *overrides]).evaluation.protocol.instantiate()
    generator = torch.Generator().manual_seed(0)
    x, labels = torch.randn(30, 4, generator=generator), torch.arange(30) % 3
    head = nn.Linear(4, 3)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    made.fit(lambda rows: head(x[rows]), labels, modules=[head], generator=generator)
    rates = [0.01, 0.01, 0.001, 0.0001]
    weight, bias = slow_sgd(x.double().numpy(), labels, classes=3, rates=rates, momentum=0.9, nesterov=True)
    np.testing.assert_allclose(head.weight.detach(), weight, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(head.bias.detach(), bias, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("epochs", "right"), [(0, 0.5), (1, 1.0), (5, 1.0)])
def test_batch_norm_in_training_mode_takes_batch_statistics(epochs, right):
    """With a much too high running mean all features are 0, and half of the predictions are correct."""
    encoder = Halves()
    encoder.norm.running_mean.fill_(100.0)
    before, evaluated = copy.deepcopy(encoder.state_dict()), halves(encoder, 60, 20)
    # A view that changes nothing, so that all three run the encoder in every epoch.
    result = evaluate(protocol(batch_norm_epochs=epochs, view={"flip_prob": 0.0}), evaluated, seed=0)
    assert result["mine"].value == right
    assert encoder.training
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


def test_only_the_drawn_share_of_labels_is_used():
    """All other images are flipped; training on them would give wrong predictions for most test images.

    The encoder computes 2 images for the feature length, 6 in each of 5 epochs, and 20 at the end.
    """
    for changes, encoder in ({}, None), ({"view": {"flip_prob": 0.5}}, Halves()):
        evaluated = halves(encoder, 60, 20)
        training_path = (0, "linear probe", "mine", "0.1")
        drawn = stratified_sample(evaluated.train.labels, share=0.1, generator=numpy_generator(*training_path))
        others = torch.ones(60, dtype=torch.bool)
        others[drawn] = False
        evaluated.train.images.tensor[others] = evaluated.train.images.tensor[others].flip(2)
        result = evaluate(protocol(shares=[0.1], **changes), evaluated, seed=0)
        assert result == {"mine_10_percent": Score(1.0)}
        assert encoder is None or encoder.seen == [52]
        assert evaluate(protocol(shares=[1.0, 0.1], **changes), evaluated, seed=0) == {"mine": Score(0.0), **result}


def test_the_seed_decides_result_and_views():
    drop = torch.nn.Dropout(0.5)  # draws from torch's own chance
    images = halves(None, 60, 20).train.images[:]

    def view(training_path):
        images_of, view = halves(None, 60, 20), {"flip_prob": 0.5}
        made = AugmentedViews(images_of, transform=lambda x: drop(x.float()).byte(), view=view, seed_path=training_path)
        return made(images)

    assert torch.equal(view((0, "a")), view((0, "a")))
    assert not torch.equal(view((0, "a")), view((1, "a")))
    untouched = AugmentedViews(halves(None, 60, 20), transform=None, view={}, seed_path=(0,))(images)
    torch.testing.assert_close(untouched, (images.float() / 255 - 0.5) / 0.5)
    flipped = AugmentedViews(halves(None, 60, 20), transform=lambda image: image.flip(2), view={}, seed_path=(0,))(
        images
    )
    torch.testing.assert_close(flipped, untouched.flip(3))


def test_the_map_of_an_encoder_before_pooling():
    """Its mean over positions is the representation; a probe does not change the run's encoder."""
    torch.manual_seed(0)
    encoder = conv_small(channels=1, size=8, width=4).eval()
    images = torch.randn(3, 1, 8, 8)
    h = encoder(images)
    encoder.return_feature_map = True
    result = encoder(images)
    assert result.shape == (3, 16 * 2 * 2)
    torch.testing.assert_close(result.view(3, 16, -1).mean(2), h)
    encoder.return_feature_map = False
    seen = []
    encoder.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    small = compose(["dataset.limit=30", "dataset.test_limit=10"]).data
    evaluate(protocol(features="map", epochs=1), make_evaluation_input(encoder, small, device=CPU), seed=0)
    assert {length for _, length in seen} == {64}
    assert max(count for count, _ in seen) == 15  # of 30 training images: maps are those of a batch at a time
    assert torch.equal(encoder(images), h)
    with pytest.raises(InputError, match="features=map needs an encoder in stages and Halves is none"):
        evaluate(protocol(features="map"), halves(Halves(), 60, 20), seed=0)


def noisy(n: int, *, dim: int = 8, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Overlapping Gaussian classes around the same centers, of features that differ in scale by a factor of ten."""
    centers = 2 * torch.randn(classes, dim, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(n) % classes
    noise = torch.randn(n, dim, generator=torch.Generator().manual_seed(n))
    return (centers[labels] + 2 * noise) * torch.logspace(0, -1, dim), labels


@pytest.mark.heavy
def test_our_linear_probe_is_close_to_converged_sgd():
    """2,000 test images, of which 0.2 points are 4.

    Both minimize the same convex function with a unique minimum. Predictions differ only if the scores of two classes
    are nearly equal. 100 epochs of SGD with a decaying learning rate nearly converge.
    """
    (train, labels), (test, test_labels) = noisy(1000), noisy(2000)
    mean, std = train.mean(0), train.std(0, correction=0)
    images = [
        LabeledImages(TensorImages(torch.zeros(len(y), 1, 1, 1, dtype=torch.uint8)), y) for y in (labels, test_labels)
    ]

    def evaluated(made, x, x_test):
        given = EvaluationInput(encoder=None, train=images[0], test=images[1], mean=(0.5,), std=(0.5,), device=CPU)
        given.__dict__["features"] = Features(x, labels, x_test, test_labels, num_classes=4)
        return next(iter(evaluate(made, given, seed=0).values())).value

    sgd = protocol(
        epochs=100,
        batch_size=100,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100),
    )
    own, usual = evaluated(LinearProbe(l2=0.0), train, test), evaluated(sgd, (train - mean) / std, (test - mean) / std)
    assert 0.6 < own < 0.95  # neither without errors nor by chance
    assert abs(own - usual) <= 0.002


@pytest.mark.parametrize(
    ("choice", "numbers", "lr"),
    [
        ("l_dawa", ("map", 100, 100, 128, torch.optim.SGD), 0.01),
        ("fedu", ("pooled", 0, 200, 2048, torch.optim.Adam), 0.003),
        ("fedu2", ("pooled", 0, 200, 512, torch.optim.Adam), 0.003),
        ("dec_ssl", ("pooled", 1, 50, 256, torch.optim.Adam), 0.001),
        ("lw_fedssl", ("pooled", 0, 20, 256, torch.optim.AdamW), 0.03),
    ],
)
def test_settings_files_have_the_papers_values(choice, numbers, lr):
    made = compose([f"final_evaluation={choice}/linear"]).evaluation.final_protocol.instantiate()
    optimizer = made.optimizer([{"params": [nn.Parameter(torch.zeros(1))]}])
    result = (made.features, made.batch_norm_epochs, made.epochs, made.batch_size, type(optimizer))
    assert (made.name, made.shares, *result) == (f"linear_{choice}", (1.0,), *numbers)
    assert optimizer.param_groups[0]["lr"] == lr
    assert made.features_cacheable == (choice in ("fedu", "fedu2"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["evaluation.shares=[]"], "shares=.. of a linear probe must have at least one share"),
        (
            ["evaluation.shares=[2.0]"],
            r"evaluation.shares=\[2.0\] must be a list of numbers above 0 and at most 1; the",
        ),
        (["evaluation.features=both"], "evaluation.features=both must be pooled or map; the default is pooled"),
        (["evaluation.batch_norm_epochs=-1"], "evaluation.batch_norm_epochs=-1 must be an integer of at least 0; the"),
        (["evaluation.epochs=-1"], "evaluation.epochs=-1 must be an integer of at least 0; the default is 50"),
        (["evaluation.batch_size=1"], "evaluation.batch_size=1 must be an integer of at least 2; the default is 256"),
        (["evaluation.view={flip_prob: 2}"], "evaluation.view.flip_prob=2 must be at most 1"),
        (["+evaluation.view.count=0"], "view.count is not a setting of a view"),
        (["evaluation.optimizer.lr=-1"], "evaluation.optimizer.lr=-1 must be a number of at least 0; the default is"),
        (
            ["+evaluation.optimizer.eps=-1"],
            "optimizer or lr_schedule of a linear probe rejects its settings: Invalid eps",
        ),
    ],
)
def test_invalid_settings_are_one_sentence(overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        compose(["evaluation=dec_ssl/linear", *overrides]).evaluation.protocol.instantiate()


def test_warm_up_and_cosine_by_hand():
    """Two epochs of warm-up: 1/2 and 1. Then (1 + cos(pi k / 4)) / 2 for k = 0 to 3: 1, 0.8536, 1/2, 0.1464."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule, rates = warmup_cosine(optimizer, epochs=6, warmup=2), []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([1, 2, 2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5)])
    with pytest.raises(InputError, match="warmup=6 must be at least 0 and fewer than the epochs=6"):
        warmup_cosine(optimizer, epochs=6, warmup=6)
