import threading

import numpy as np
import pytest
import torch
from torch import nn

from fedssl.config.load import compose
from fedssl.datasets.images import TensorImages
from fedssl.methods.base import SSLMethod, build_method
from fedssl.model_arrays import copy_layers, exchanged_names, local_names, move_layers_out
from fedssl.regularizers.base import Regularizer
from fedssl.regularizers.prox import Proximal
from fedssl.seeding import torch_generator
from fedssl.training import LocalTrainer, batches, train
from tests.encoders import LinearEncoder
from tests.gpu_stand_in import treat_cpu_as_gpu
from tests.local_training import local_training


@pytest.mark.parametrize(
    ("num_images", "batch_size", "sizes"),
    [
        *((10, 4, [4, 3, 3]), (8, 4, [4, 4]), (3, 64, [3]), (129, 64, [43, 43, 43]), (65, 64, [33, 32])),
        *((3, 2, [3]), (5, 2, [3, 2])),
    ],
)
def test_an_epoch_sees_every_image_once_in_nearly_equal_batches(num_images, batch_size, sizes):
    indices = torch.arange(100, 100 + num_images)
    epoch = list(batches(indices, batch_size, generator=torch_generator(0, "x")))
    assert [len(batch) for batch in epoch] == sizes
    assert torch.equal(torch.cat(epoch).sort().values, indices)


@pytest.mark.parametrize(
    ("num_images", "batch_size", "sizes"), [(4, 3, [4]), (5, 3, [5]), (7, 3, [4, 3]), (9, 3, [3, 3, 3]), (2, 3, [2])]
)
def test_no_batch_is_smaller_than_what_the_method_learns_from(num_images, batch_size, sizes):
    epoch = batches(torch.arange(num_images), batch_size, generator=torch_generator(0, "x"), min_batch_size=3)
    assert [len(batch) for batch in epoch] == sizes


def test_the_learning_rate_is_the_first_times_a_factor():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.4}], momentum=0.9)
    training = local_training(optimizer)
    weight.sum().backward()
    optimizer.step()
    for factor, lr in ((0.5, 0.2), (0.25, 0.1), (1.0, 0.4)):  # always times 0.4
        training.reset_optimizer(lr_factor=factor)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(lr)
        assert not optimizer.state


def test_options_in_which_an_optimizer_keeps_state_are_reset():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.4)  # Prodigy and timm's LAMB keep numbers there
    optimizer.param_groups[0]["k"] = [0]
    training = local_training(optimizer)
    group = optimizer.param_groups[0]
    for _ in range(2):
        group["k"][0], group["momentum"], group["d"] = 5, 0.5, 2.0
        training.reset_optimizer(lr_factor=0.5)
    assert optimizer.param_groups[0] is group
    assert (group["k"], group["momentum"], group["lr"], "d" in group) == ([0], 0, 0.2, False)


def test_options_keep_weights_and_what_cannot_be_copied():
    weight, lock = nn.Parameter(torch.ones(1)), threading.Lock()
    optimizer = torch.optim.SGD([weight], lr=0.4)
    group = optimizer.param_groups[0]
    group |= {"anchor": [weight], "lock": lock, "computed": weight * 2}
    local_training(optimizer).reset_optimizer(lr_factor=1)
    assert group["anchor"][0] is weight
    assert group["lock"] is lock
    assert group["computed"].item() == 2


NONE = Regularizer()


class Toy(SSLMethod):
    """Loss w * mean(view 1) - so the gradient is mean(view 1), known by hand."""

    def __init__(self):
        super().__init__()
        self.encoder = LinearEncoder([[1.0]])
        self.steps = 0

    def loss(self, views):
        return self.encoder.weight.squeeze() * views[0].images.mean()

    def on_step_end(self):
        self.steps += 1


def run(method, *, epochs, images=None, batch_size=2, regularizer=NONE, clip_norm=None, channels_last=True):
    images = torch.tensor([1, 3, 5, 7], dtype=torch.uint8).reshape(4, 1, 1, 1) if images is None else images
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=0.1)
    return train(
        method,
        TensorImages(images),
        torch.arange(len(images)),
        training=local_training(
            optimizer,
            regularizer=regularizer,
            epochs=epochs,
            batch_size=batch_size,
            clip_norm=clip_norm,
            channels_last=channels_last,
        ),
        generator=torch_generator(0, "train"),
    )


def test_steps_and_loss_by_hand():
    # One batch of all four images, mean 4: w = 1 -> loss 4, gradient 4, w = 1 - 0.1 * 4 = 0.6 -> loss 2.4, w = 0.2.
    method = Toy()
    result = run(method, epochs=2, batch_size=4)
    assert result.loss == pytest.approx(2.4)
    assert method.encoder.weight.item() == pytest.approx(0.2)
    assert (result.num_examples, method.steps) == (4, 2)


def test_long_gradients_are_cut_to_length():
    # The gradient is 4: with clip_norm 1 a step is 0.1, with 5 it is 0.4.
    for clip_norm, weight in ((1.0, 0.9), (5.0, 0.6)):
        method = Toy()
        run(method, epochs=1, batch_size=4, clip_norm=clip_norm)
        assert method.encoder.weight.item() == pytest.approx(weight)


def test_the_proximal_term_by_hand():
    # mu = 0.5 and w_0 = 1. Step 1 at w = 1: term 0, gradient 4 + 0.5 * 0, w = 0.6. Step 2: loss 4 * 0.6 + 0.25 * 0.4^2
    # = 2.44, gradient 4 + 0.5 * (0.6 - 1) = 3.8, w = 0.6 - 0.38 = 0.22.
    method = Toy()
    result = run(method, epochs=2, batch_size=4, regularizer=Proximal(weight=0.5))
    assert result.loss == pytest.approx(2.44)
    assert method.encoder.weight.item() == pytest.approx(0.22)


class Outputs(Regularizer):
    """Collects what it sees."""

    part = "encoder"

    def __init__(self):
        self.seen = []

    def apply(self, loss, step):
        self.seen.append(step.z)
        return loss


@pytest.mark.parametrize("concat_views", [True, False])
def test_a_regularizer_sees_the_representations_of_both_views(concat_views):
    class Sums(Toy):
        def loss(self, views):
            flat = [images.flatten(1) for images in views.images]
            h = [self.encoder(torch.cat(flat))] if concat_views else [self.encoder(view) for view in flat]
            return torch.cat(h).sum()

    method, regularizer = Sums(), Outputs()
    images = torch.tensor([1, 2], dtype=torch.uint8).reshape(2, 1, 1, 1)
    run(method, epochs=1, images=images, regularizer=regularizer)
    z1, z2 = regularizer.seen[0]
    assert sorted(z1.flatten().tolist()) == sorted(z2.flatten().tolist()) == [1.0, 2.0]
    assert z1.requires_grad
    assert not method.encoder._forward_hooks


def test_a_regularizer_sees_the_first_two_of_more_views():
    """Three views of two images in one forward pass: rows 1 and 2, and rows 3 and 4."""

    class Sums(Toy):
        def loss(self, views):
            return self.encoder(torch.cat(views.images).flatten(1)).sum()

    method, regularizer = Sums(), Outputs()
    optimizer = torch.optim.SGD(method.parameters(), lr=0.1)
    training = local_training(
        optimizer, augment=lambda x, _: (x.float(), 10.0 + x, 100.0 + x), regularizer=regularizer, batch_size=2
    )
    images = TensorImages(torch.tensor([1, 2], dtype=torch.uint8).reshape(2, 1, 1, 1))
    train(method, images, torch.arange(2), training=training, generator=torch_generator(0, "train"))
    ((z1, z2),) = regularizer.seen
    assert torch.equal(z2, z1 + 10)
    assert sorted(z1.flatten().tolist()) == [1, 2]


def trained(overrides):
    """Layers after local training as a client prepares it, and the weights' own layout."""
    settings = compose(["dataset=cifar10", "encoder.width=8", "batch_size=8", "local_epochs=2", *overrides])
    method = build_method(settings.model)
    method.start_round(first=True)
    images = torch.randint(256, (20, 3, 32, 32), dtype=torch.uint8, generator=torch_generator(0, "pictures"))
    training = LocalTrainer.build(settings.training, method)
    train(method, TensorImages(images), torch.arange(20), training=training, generator=torch_generator(0, "train"))
    weight = method.named_tensors["encoder.blocks.1.0.weight"]
    layers = {**copy_layers(method, local_names(method)), **move_layers_out(method, exchanged_names(method))}
    return layers, weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("overrides", [["method=fedx", "regularizer=prox"], ["channels_last=false"]])
def test_the_way_of_a_gpu_trains_the_same_model(monkeypatch, overrides):
    """On a CPU that stands in for a GPU: weights have the layout of the views, and do not travel in it."""
    expected, _ = trained(overrides)
    treat_cpu_as_gpu(monkeypatch)
    layers, last = trained(overrides)
    assert last == (overrides != ["channels_last=false"])
    for name, array in layers.items():
        assert array.flags.c_contiguous
        np.testing.assert_allclose(array, expected[name], rtol=1e-2, atol=1e-3, err_msg=name)


def test_loss_is_the_mean_per_image_whatever_the_batch_sizes():
    # Without a step (gradient zero at lr 0 is not needed: the loss does not depend on w when images are equal) every
    # batch of images of value 2 has loss 2w; with 5 images in batches of 3 and 2 the mean per image is still that
    # of the batches weighted by 3/5 and 2/5: 2 * (3/5 * 1 + 2/5 * 0.8), since w falls by 0.1 * 2 after the first batch.
    method = Toy()
    result = run(method, epochs=1, batch_size=3, images=torch.full((5, 1, 1, 1), 2, dtype=torch.uint8))
    assert result.loss == pytest.approx(2 * (3 / 5 * 1.0 + 2 / 5 * 0.8))


def test_the_proximal_term_starts_where_each_training_starts():
    method, regularizer = Toy(), Proximal(weight=0.5)
    run(method, epochs=2, batch_size=4, regularizer=regularizer)
    method.encoder.weight.data.fill_(1.0)
    assert run(method, epochs=2, batch_size=4, regularizer=regularizer).loss == pytest.approx(2.44)
    assert run(Toy(), epochs=2, batch_size=4, regularizer=Proximal(weight=0.0)).loss == pytest.approx(2.4)
