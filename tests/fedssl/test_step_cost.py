"""The cost of a training step, by hand for a transformer so small that it can be counted."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from fedssl.config.load import compose
from fedssl.datasets.images import TensorImages
from fedssl.encoders import vit_tiny
from fedssl.methods.base import build_method
from fedssl.methods.heads import MLP
from fedssl.methods.moco_v3 import MoCoV3
from fedssl.regularizers.alignment import Alignment
from fedssl.regularizers.base import Regularizer
from fedssl.schedule.stages import set_active_stages
from fedssl.step_cost import TensorMemory, count_flops, step_cost
from fedssl.training import LocalTrainer, train
from tests.local_training import local_training
from tests.methods import METHODS, REGULARIZERS, overrides_of

BATCH = 8

# Multiply-adds per view of 4 patches, each of 4 numbers and then of width 4. A block has the linear layers 4 -> 12
# (queries, keys, values), 4 -> 4, 4 -> 16 and 16 -> 4, so 192 per patch; attention multiplies 4 x 4 x 4 twice.
PATCHES, LINEAR, ATTENTION = 4 * 4 * 4, 4 * 192, 2 * 4 * 4 * 4
PROJECTOR, PREDICTOR = 4 * 8 + 8 * 4, 4 * 4
# A trained linear layer costs once more for the gradient of its weights and once for that of its inputs, which images
# do not need; attention has five products in the backward pass for two in the forward pass.
TRAINED_BLOCK = 3 * LINEAR + ATTENTION + ATTENTION * 5 // 2
HEADS = 3 * (PROJECTOR + PREDICTOR) + PROJECTOR  # the target has no predictor
SCORES = 2 * BATCH * 4  # an image's similarities to the batch, and their gradient for one of the two views

DEFAULT = ("distillation", "fedca", "mae", "supervised", "swav")


def moco(*, depth=2, size=4, width=4, heads=2, hidden_dim=8):
    torch.manual_seed(0)
    encoder = vit_tiny(channels=1, size=size, patch=2, depth=depth, width=width, heads=heads, pool="mean")
    head = partial(MLP, hidden_dim=hidden_dim, out_dim=4)
    projector, predictor = head, partial(head, num_layers=1)
    return MoCoV3(encoder, projector=projector, predictor=predictor, temperature=0.2, ema_decay=0.9)


def views(images, generator):
    noise = torch.rand(images.shape, generator=generator)
    return images / 255, images / 255 + noise


def make_images(number=BATCH, size=4):
    return torch.randint(0, 256, (number, 1, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def adam(method):
    return torch.optim.AdamW([method.named_tensors[name] for name in method.trainable], lr=0.01)


def cost_of(method, *, optimizer=None, **options):
    training = local_training(optimizer or adam(method), augment=views, **options)
    return step_cost(method, images=make_images(), training=training)


def one_step(method, optimizer, regularizer, images, generator):
    train(
        method,
        TensorImages(images),
        torch.arange(len(images)),
        training=local_training(optimizer, augment=views, regularizer=regularizer, batch_size=len(images)),
        generator=generator,
    )


def test_flops_end_to_end():
    online = 2 * PATCHES + 2 * TRAINED_BLOCK
    target = PATCHES + 2 * (LINEAR + ATTENTION)
    expected = 2 * 2 * (online + target + HEADS + SCORES)
    assert cost_of(moco()).flops_per_image == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])  # without autocast torch takes another kernel in eval mode
def test_frozen_stages_count_forward_and_once_for_all_networks(precision):
    method = moco()
    frozen = PATCHES + LINEAR + ATTENTION
    target = LINEAR + ATTENTION
    expected = 2 * 2 * (frozen + TRAINED_BLOCK + target + HEADS + SCORES)
    with set_active_stages(method, depth=2, frozen=1):
        assert cost_of(method, precision=precision).flops_per_image == expected
        # Alignment: the received block, and scores of representations with those of the other view.
        aligned = cost_of(method, precision=precision, regularizer=Alignment())
    assert aligned.flops_per_image == expected + 2 * 2 * (LINEAR + ATTENTION + SCORES)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_flops_of_convolutions_with_groups(groups):
    """2 * 5 images * 4 * 3 positions * 3 * 3 elements of a kernel * 12 output channels * 6 / groups input channels.

    The forward pass and both gradients have as many; the input of the first convolution has no gradient.
    """
    first, second = (nn.Conv2d(width, 12, 3, padding=1, groups=groups) for width in (6, 12))
    with count_flops() as flops:
        second(first(torch.ones(5, 6, 4, 3))).sum().backward()
    one = 2 * 5 * 12 * 9 * 12 * 6 // groups
    assert flops.get_total_flops() == 2 * one + 3 * 2 * one


def test_parameters():
    method = moco()
    # Two layer normalizations of 2 * 4, linear layers with biases.
    block = 2 * 2 * 4 + (4 + 1) * 12 + (4 + 1) * 4 + (4 + 1) * 16 + (16 + 1) * 4
    stem = (4 + 1) * 4 + 4 * 4  # patch embedding, positions
    last_batch_norm, projector, predictor = 2 * 4, 4 * 8 + 2 * 8 + (8 + 1) * 4, (4 + 1) * 4
    cost = cost_of(method)
    assert cost.trained_parameters == stem + 2 * block + last_batch_norm + projector + predictor
    assert cost.parameters_in_memory == cost.trained_parameters + stem + 2 * block + last_batch_norm + projector
    with set_active_stages(method, depth=2, frozen=1):
        cost = cost_of(method)
    assert cost.trained_parameters == block + last_batch_norm + projector + predictor
    # The frozen part is there once: the target uses what it puts out.
    assert cost.parameters_in_memory == cost.trained_parameters + stem + block + block + last_batch_norm + projector


def test_memory_by_hand():
    before = torch.zeros(1000)
    with TensorMemory() as memory:
        before += 1
        shared = before.view(10, 100)  # no new memory
        one = torch.ones(250)  # 1,000 bytes
        both = torch.cat((one, one))  # 2,000
        part = both[:10]
        assert memory.peak() == 3000
        del both
        other = torch.zeros(100)  # `part` keeps the 2,000
        assert memory.peak() == 3400
        del part, one
        memory.reset_peak()
        assert memory.peak() == 400
        del other
        torch.zeros(10)
        assert memory.peak() == 400
        memory.reset_peak()
        assert memory.peak() == 0
    assert shared.shape == (10, 100)


def test_optimizer_state_exists_for_what_is_trained_only():
    method = moco(depth=3)
    optimizer = adam(method)
    with set_active_stages(method, depth=2, frozen=1):
        one_step(method, optimizer, Regularizer(), make_images(), torch.Generator())
        trained = cost_of(method).trained_parameters
    names = {id(method.named_tensors[name]): name for name in method.trainable}
    parts = {names[id(parameter)].removeprefix("encoder.encoder.") for parameter in optimizer.state}
    assert {part.partition(".")[0] for part in parts} == {"layers", "ln", "projector", "predictor"}
    assert {part.split(".")[1] for part in parts if part.startswith("layers")} == {"encoder_layer_1"}
    moments = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    assert moments == trained


@pytest.mark.parametrize(("stage", "started"), [((3, 0), True), ((3, 2), False)])
def test_a_measurement_leaves_every_bit(stage, started):
    def after(measured):
        method = moco(depth=3)
        with set_active_stages(method, depth=stage[0], frozen=stage[1]):
            return after_steps(method, measured)

    def after_steps(method, measured):
        regularizer, generator, optimizer = Alignment(), torch.Generator().manual_seed(3), adam(method)
        torch.manual_seed(5)
        if started:
            one_step(method, optimizer, regularizer, make_images(), generator)
        if measured:
            before = copy.deepcopy((method.state_dict(), optimizer.state_dict())), torch.get_rng_state()
            training = [module.training for module in method.modules()]
            cost_of(method, optimizer=optimizer, regularizer=regularizer)
            same(before[0], (method.state_dict(), optimizer.state_dict()))
            assert torch.equal(before[1], torch.get_rng_state())
            assert [module.training for module in method.modules()] == training
            assert (regularizer.received is not None) == started
        one_step(method, optimizer, regularizer, make_images(), generator)
        return method.state_dict(), optimizer.state_dict(), generator.get_state(), torch.get_rng_state()

    same(after(False), after(True))


def same(one, other):
    """Two nested containers hold the same bits."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        same(list(one.values()), list(other.values()))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            same(*pair)
    else:
        assert one == other


@pytest.mark.parametrize(
    "overrides",
    [
        *(pytest.param(overrides_of(name), marks=[] if name in DEFAULT else pytest.mark.heavy) for name in METHODS),
        ["method=dino", "augmentation=digits_multi_crop"],
        *(pytest.param([f"regularizer={name}"], marks=pytest.mark.heavy) for name in REGULARIZERS),
    ],
    ids=lambda overrides: overrides[0],
)
def test_every_method_and_regularizer_can_be_measured(overrides):
    settings = compose(["dataset=digits", "encoder.width=4", *overrides])
    method = build_method(settings.model)
    LocalTrainer.build(settings.training, method)  # adds the parts that the regularizer uses
    images, labels = make_images(16, size=8), torch.arange(16) % 10
    before = copy.deepcopy(method.state_dict())
    trainers = (LocalTrainer.build(settings.training, method) for _ in range(2))
    costs = [step_cost(method, images=images, training=training, labels=labels) for training in trainers]
    assert costs[0] == costs[1]
    weights = sum(tensor.nbytes for tensor in before.values())
    assert costs[0].peak_memory > weights + 4 * costs[0].trained_parameters  # and the gradients
    matrices = [parameter for parameter in method.parameters() if parameter.requires_grad and parameter.dim() > 1]
    # Each meets every image at least forward and for its gradient.
    assert costs[0].flops_per_image >= 2 * 2 * sum(matrix.numel() for matrix in matrices)
    same(before, method.state_dict())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    settings = compose(["dataset=digits", "encoder.width=8", "method=moco_v3"])
    result = {}
    for device in ("cpu", "cuda"):
        method = build_method(settings.model).to(device)
        state = torch.cuda.get_rng_state()
        result[device] = step_cost(
            method, images=make_images(64, size=8).to(device), training=LocalTrainer.build(settings.training, method)
        )
        assert torch.equal(state, torch.cuda.get_rng_state())
    assert result["cuda"].flops == pytest.approx(result["cpu"].flops, rel=1e-3)  # views are cropped by other products
    assert result["cuda"].peak_memory > sum(tensor.nbytes for tensor in method.state_dict().values())


def test_depth_dropout_counts_as_its_expectation():
    method = moco(depth=3)
    with set_active_stages(method, depth=3, frozen=2):
        without = cost_of(method)
    with set_active_stages(method, depth=3, frozen=2, depth_dropout=0.25):
        dropped = cost_of(method)
        assert method.encoder.active_stages.depth_dropout == 0.25
    assert dropped.flops_per_image == without.flops_per_image - 0.25 * 2 * 2 * 2 * (LINEAR + ATTENTION)
    assert dropped.peak_memory == without.peak_memory


def test_flops_of_transposed_convolutions():
    """Each of the 4 * 3 positions of the input is multiplied by a kernel of 6 * 12 * 2 * 2 elements."""
    layer = nn.ConvTranspose2d(6, 12, 2, stride=2)
    with count_flops() as flops:
        layer(torch.ones(5, 6, 4, 3, requires_grad=True)).sum().backward()
    assert flops.get_total_flops() == 3 * 2 * 5 * 12 * 6 * 12 * 4
