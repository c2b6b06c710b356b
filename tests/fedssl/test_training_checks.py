"""Refusals of local training: regularizers without the outputs that they need, and views that cannot be trained on."""

import re

import pytest
import torch

from fedssl.augmentation import Augmentation
from fedssl.config.load import compose
from fedssl.datasets.images import TensorImages
from fedssl.errors import InputError
from fedssl.methods.base import SSLMethod, build_method
from fedssl.regularizers.base import Regularizer
from fedssl.regularizers.prox import Proximal
from fedssl.seeding import torch_generator
from fedssl.training import LocalTrainer, train
from fedssl.training_checks import check_regularizer
from fedssl.views import AcceptedViews
from tests.encoders import LinearEncoder

TWO_VIEWS = Augmentation(size=8, mean=[0.0], std=[1.0], views=[{"count": 2}])


class Outputs(Regularizer):
    def __init__(self, part="encoder"):
        self.part = part


class Toy(SSLMethod):
    def __init__(self):
        super().__init__()
        self.encoder = LinearEncoder([[1.0]])


class OneView(Toy):
    accepted_views = AcceptedViews(min_global=1, max_global=1)


class Masked(Toy):
    regularized_parts = ()


@pytest.mark.parametrize("kind", [OneView, Masked])
def test_a_regularizer_of_missing_outputs_is_rejected(kind):
    message = f"Outputs needs the encoder's output for 2 whole views, which {kind.__name__} does not compute; set"
    with pytest.raises(InputError, match=message):
        check_regularizer(Outputs(), kind(), TWO_VIEWS)
    check_regularizer(Outputs(), Toy(), TWO_VIEWS)
    check_regularizer(Proximal(weight=1.0), kind(), TWO_VIEWS)


def test_a_regularizer_of_a_missing_part_is_rejected():
    with pytest.raises(
        InputError, match="^Outputs needs a projector, which Toy does not have; set another regularizer"
    ):
        check_regularizer(Outputs("projector"), Toy(), TWO_VIEWS)


def build(*overrides):
    settings = compose(["encoder.width=4", "batch_size=6", "local_epochs=1", *overrides])
    method = build_method(settings.model)
    training = LocalTrainer.build(settings.training, method, term=settings.algorithm.strategy.instantiate().client.term)
    return method, training


def trained_loss(*overrides):
    method, training = build(*overrides)
    method.start_round(first=True)
    images = torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8, generator=torch_generator(0, "pictures"))
    labels, generator = torch.arange(6) % 2, torch_generator(0, "train")
    source = TensorImages(images)
    return train(method, source, torch.arange(6), training=training, generator=generator, labels=labels).loss


@pytest.mark.parametrize(
    ("override", "needed", "others"),
    [
        ("strategy=moon", "the strategy's term", "strategy=fedavg"),
        ("regularizer=alignment", "Alignment", "regularizer=none or regularizer=prox"),
        ("regularizer=fur", "FUR", "regularizer=none or regularizer=prox"),
        ("regularizer=decorr", "Decorrelation", "regularizer=none or regularizer=prox"),
        ("regularizer=feature_distillation", "FeatureDistillation", "regularizer=none or regularizer=prox"),
    ],
)
def test_terms_of_outputs_train_a_classifier_on_two_views(override, needed, others):
    """With one view they are refused, and the named setting helps."""
    supervised, one_view = ["method=supervised", override], "augmentation.views=[{}]"
    same = trained_loss(*supervised) == trained_loss("method=supervised")
    assert same == (override == "strategy=moon")  # whose term is 0 without a last model
    message = (
        f"{needed} needs the encoder's output for 2 whole views, but augmentation.views has 1 global view; "
        f"set augmentation.views.0.count=2, or {others}"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        build(*supervised, one_view)
    assert trained_loss(*supervised, one_view, "augmentation.views.0.count=2") > 0


def test_the_recipe_that_lacks_a_view_is_named():
    """By its number among the recipes, of which global ones come first in a batch."""
    views = [{"role": "local", "size": 0.5, "count": 3}, {}]
    augment = Augmentation(size=8, mean=[0.0], std=[1.0], views=views)
    message = "but augmentation.views has 1 global view and 3 local views; set augmentation.views.1.count=2, or"
    with pytest.raises(InputError, match=message):
        check_regularizer(Outputs(), Toy(), augment)


def test_unaccepted_views_are_rejected_with_a_recipe():
    """The message names an augmentation that works."""
    found, remedy = "2 global views and 4 local views", "set augmentation=simclr"
    message = f"^SimCLR trains on 2 global views but augmentation.views has {found}; {remedy}$"
    with pytest.raises(InputError, match=message):
        build("augmentation=digits_multi_crop")
    build("augmentation=simclr")
