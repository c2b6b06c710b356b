"""Tokens of vision transformers: their order and positions, registers, smaller views, and parts of an image."""

import math
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import Tensor

from fedssl.datasets.images import TensorImages
from fedssl.encoders import vit_tiny
from fedssl.encoders.base import ActiveStages
from fedssl.encoders.tokens import TokenEncoder, attention, gather_patches, interpolate_positions
from fedssl.errors import InputError
from fedssl.evaluation.features import extract
from fedssl.tuning.lora import lora

WIDTH, PATCH, SIZE = 12, 4, 16  # 4 x 4 patches
NAMES = ("pool", "positions", "registers")
KINDS = [dict(zip(NAMES, one, strict=True)) for one in product(("token", "mean"), ("sincos", "learned"), (0, 3))]


def vit(*, size: int = SIZE, depth: int = 2, seed: int = 0, **options) -> TokenEncoder:
    torch.manual_seed(seed)
    encoder = vit_tiny(channels=3, size=size, patch=PATCH, depth=depth, width=WIDTH, heads=3, **options)
    assert isinstance(encoder, TokenEncoder)
    if "class_token" in encoder.state_dict():
        torch.nn.init.normal_(encoder.class_token, generator=torch.Generator().manual_seed(2))  # initially 0
    return encoder


def images_of(size: int = SIZE, *, batch: int = 2) -> Tensor:
    return torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def test_gathered_patches_by_hand():
    tokens = torch.tensor([[[10, 11], [20, 21], [30, 31]], [[40, 41], [50, 51], [60, 61]]])
    indices = torch.tensor([[2, 0], [1, 1]])
    assert gather_patches(tokens, indices).tolist() == [[[30, 31], [10, 11]], [[50, 51], [50, 51]]]


@pytest.mark.parametrize("heads", [1, 3])
def test_attention_equals_the_equation(heads: int):
    """Slowly, in float64: the values of all tokens, weighted by the softmax of scaled products of query and keys."""
    projected = torch.randn(2, 5, 3 * WIDTH, dtype=torch.float64)
    width = WIDTH // heads
    expected = torch.zeros(2, 5, WIDTH, dtype=torch.float64)
    for image, tokens in enumerate(projected):
        for head in range(heads):
            q, k, v = (tokens[:, start + head * width :][:, :width] for start in (0, WIDTH, 2 * WIDTH))
            for i in range(5):
                scores = [math.exp(float((q[i] * k[j]).sum()) / math.sqrt(width)) for j in range(5)]
                mean = sum(score * v[j] for j, score in enumerate(scores)) / sum(scores)
                expected[image, i, head * width : (head + 1) * width] = mean
    torch.testing.assert_close(attention(projected, heads=heads), expected, rtol=1e-12, atol=1e-12)


def cubic(x: float) -> float:
    """Keys' kernel with a = -0.75, which image libraries and torch use."""
    a, x = -0.75, abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


@pytest.mark.parametrize(("grid", "side"), [(4, 2), (8, 3), (7, 5), (2, 1), (3, 6)])
def test_interpolated_positions_equal_the_sum_over_16_neighbors(grid: int, side: int):
    """Slowly: the middle of patch i is at (i + 1/2) grid / side - 1/2, and neighbors outside repeat the border."""
    positions = torch.randn(1, grid * grid, 3, generator=torch.Generator().manual_seed(grid))
    square = positions.double().view(grid, grid, 3)
    expected = torch.zeros(side, side, 3, dtype=torch.float64)
    for i in range(side):
        for j in range(side):
            y, x = ((k + 0.5) * grid / side - 0.5 for k in (i, j))
            for r in range(int(y // 1) - 1, int(y // 1) + 3):
                for c in range(int(x // 1) - 1, int(x // 1) + 3):
                    clamped = square[min(max(r, 0), grid - 1), min(max(c, 0), grid - 1)]
                    expected[i, j] += cubic(y - r) * cubic(x - c) * clamped
    found = interpolate_positions(positions, side)
    torch.testing.assert_close(found, expected.view(1, side * side, 3).float(), rtol=0, atol=1e-5)


def test_positions_are_not_rounded_by_autocast():
    positions = torch.randn(1, 16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        inside = interpolate_positions(positions, 2)
    assert torch.equal(inside, interpolate_positions(positions, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_their_order_by_hand(kind: dict):
    """In float64: a patch's pixels times the weights, plus the position in its row and column, after the prefix."""
    encoder = vit(**kind)
    images, stored = images_of().double(), encoder.encoder.pos_embedding[0].detach().double()
    weight, bias = (value.detach().double() for value in encoder.conv_proj.parameters())
    token = kind["pool"] == "token"
    assert (encoder.patch_size, encoder.grid) == (4, 4)
    assert encoder.num_prefix_tokens == token + kind["registers"]
    assert stored.shape == (token + 16, WIDTH)  # registers have no positions
    expected = []
    for image in images:
        prefix = [encoder.class_token.detach().double()[0, 0] + stored[0]] if token else []
        prefix += list(encoder.register_tokens.detach().double()[0]) if kind["registers"] else []
        places = [(r, c) for r in range(4) for c in range(4)]
        sums = [(weight * image[:, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4]).sum(dim=(1, 2, 3)) for r, c in places]
        patches = [one + bias + stored[-16 + number] for number, one in enumerate(sums)]
        expected.append(torch.stack([*prefix, *patches]))
    tokens = torch.stack(expected).float()
    torch.testing.assert_close(encoder.run_stem(images.float()), tokens, rtol=0, atol=1e-5)
    embedded = encoder.embed(images.float())
    torch.testing.assert_close(embedded, tokens[:, encoder.num_prefix_tokens :], rtol=0, atol=1e-5)
    with encoder.run_stages(ActiveStages(depth=0)):  # the layer normalization alone
        normalized = torch.nn.functional.layer_norm(tokens, (WIDTH,), eps=1e-6)
        torch.testing.assert_close(encoder.forward_tokens(embedded), normalized, rtol=0, atol=1e-4)


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_registers_take_part_in_attention_but_not_in_h(pool: str):
    encoder, without = vit(pool=pool, registers=2), vit(pool=pool)
    state = encoder.state_dict()
    assert state.pop("register_tokens").shape == (1, 2, WIDTH)
    assert {name: value.tolist() for name, value in without.state_dict().items()} == {
        name: value.tolist() for name, value in state.items()
    }
    first, second = encoder.register_tokens.detach()[0]
    assert not torch.equal(first, second)  # equal ones would stay equal in training
    before = encoder(images_of())
    before[:, 0].sum().backward()
    assert encoder.register_tokens.grad.norm() > 0
    with torch.no_grad():
        encoder.register_tokens.add_(torch.randn(1, 2, WIDTH))
    assert (encoder(images_of()) - before).norm() > 1e-3

    # With normalized tokens of constant values 10, ..., h is that of the class token or the mean over patches.
    tokens = torch.arange(10.0, 10 + encoder.num_prefix_tokens + 4).view(1, -1, 1).expand(-1, -1, WIDTH)
    expected = 10.0 if pool == "token" else 12 + 1.5  # patches are 12, 13, 14 and 15
    assert encoder.pool_tokens(tokens).tolist() == [[expected] * WIDTH]
    varied = torch.randn(3, encoder.num_prefix_tokens + 4, WIDTH)
    torch.testing.assert_close(encoder.pool(varied), encoder.pool_tokens(encoder.encoder.ln(varied)))


def test_hidden_patches_are_the_mask_token_at_their_positions():
    encoder = vit(positions="sincos")
    hidden = torch.zeros(2, 16, dtype=torch.bool)
    hidden[0, 3] = hidden[1, 0] = hidden[1, 15] = True
    mask_token = torch.randn(WIDTH, requires_grad=True)
    full, masked = encoder.embed(images_of()), encoder.embed(images_of(), hidden=hidden, mask_token=mask_token)
    assert torch.equal(full[~hidden], masked[~hidden])
    places = encoder.positions(4)[0, 1:]
    for image, patch in ((0, 3), (1, 0), (1, 15)):
        assert torch.equal(masked[image, patch], mask_token + places[patch])
    masked.sum().backward()
    assert mask_token.grad.tolist() == [3.0] * WIDTH


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "lora_rank"), [(SIZE, 0), (8, 0), (SIZE, 2)])
def test_visible_patches_are_those_of_all(kind: dict, size: int, lora_rank: int):
    """Values and gradients, in any order, also of a smaller view and with LoRA of the patch embedding."""
    encoder = vit(**kind).double()
    if lora_rank:
        lora(encoder, rank=lora_rank, alpha=1.0, targets=["conv_proj"])
        torch.nn.init.normal_(encoder.conv_proj.lora_B)  # initially 0
    images = images_of(size, batch=3).double()
    visible = torch.rand(3, (size // PATCH) ** 2).argsort(dim=1)[:, :3]
    results = []
    for tokens in (encoder.embed_visible(images, visible), TokenEncoder.embed_visible(encoder, images, visible)):
        encoder.zero_grad()
        tokens.square().sum().backward()
        results.append([tokens, *(weight.grad for weight in encoder.parameters() if weight.grad is not None)])
    assert len(results[0]) > 1
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_frozen_stages_are_refused_for_parts_of_an_image():
    encoder = vit()
    patches = encoder.embed(images_of())
    with (
        encoder.run_stages(ActiveStages(depth=2, frozen=1)),
        pytest.raises(InputError, match="^1 stages of the encoder are frozen, but .*; set schedule=end_to_end or"),
    ):
        encoder.forward_tokens(patches)


@pytest.mark.parametrize("kind", KINDS)
def test_a_smaller_view_has_interpolated_positions(kind: dict):
    large, small = vit(**kind), vit(size=8, **kind)
    state = {name: value for name, value in large.state_dict().items() if name != "encoder.pos_embedding"}
    small.load_state_dict(state, strict=False)
    token = kind["pool"] == "token"
    stored = large.encoder.pos_embedding
    assert stored.shape[1] == token + 16
    with torch.no_grad():
        small.encoder.pos_embedding[:, :token] = stored[:, :token]
        small.encoder.pos_embedding[:, token:] = interpolate_positions(stored[:, token:], 2)
    torch.testing.assert_close(large(images_of(8)), small.eval()(images_of(8)), rtol=0, atol=1e-6)


def test_smaller_views_are_accepted_in_training_only():
    encoder = vit().train()
    assert encoder(images_of(8)).shape == encoder(images_of(4)).shape == (2, WIDTH)
    (frozen,) = encoder.forward_frozen([images_of(8)], torch.Generator())
    assert frozen.shape == (2, 1 + 4, WIDTH)
    message = (
        "^encoder.size=16 but the images have 8x8 pixels; leave encoder.size at its default, or use images of 16x16$"
    )
    images = TensorImages(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    with pytest.raises(InputError, match=message):
        extract(encoder, images, mean=[0.5] * 3, std=[0.5] * 3, device="cpu")
    assert encoder.training
    with pytest.raises(InputError, match=message):
        encoder.check_image_shape((3, 8, 8))
    with pytest.raises(InputError, match=message):
        encoder.eval()(images_of(8))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (3, 10, 10),
            "^a view has 10x10 pixels, which encoder.patch=4 does not divide; use views of 8x8 or 12x12 pixels$",
        ),
        ((3, 15, 15), "use views of 12x12 or 16x16 pixels$"),
        ((3, 3, 3), "^a view has 3x3 pixels.*; use views of 4x4 pixels$"),
        ((3, 20, 20), "^encoder.size=16 but the images have 20x20 pixels"),
        ((3, 8, 12), "^encoder.size=16 but the images have 8x12 pixels"),
        ((1, 8, 8), "^encoder.channels=3 but the images have 1 channels"),
        ((1, 16, 16), "^encoder.channels=3 but the images have 1 channels"),
        ((3, 16, 16), None),
        ((3, 12, 12), None),
    ],
)
def test_other_views_are_one_sentence(shape: tuple[int, ...], message: str | None):
    encoder, views = vit().train(), torch.rand(2, *shape)
    for attempt in (encoder, encoder.embed, lambda views: encoder.forward_frozen([views], torch.Generator())):
        with pytest.raises(InputError, match=message) if message else nullcontext():
            attempt(views)
