"""The predictor of hidden patches: its transformer, numbers, positions, and separate target blocks."""

import math

import pytest
import torch
from torch import Tensor

from fedssl.encoders.tokens import gather_patches, interpolate_positions, sincos_position_embedding
from fedssl.errors import InputError
from fedssl.methods.patch_prediction import PatchPredictor, Transformer
from fedssl.views import Mask
from tests.fedssl.methods.masked import slow_prediction, vit

KINDS = [{"pool": "token"}, {"pool": "mean"}, {"pool": "token", "registers": 2}]


def predictor(encoder, *, width=12, out_features=5):
    torch.manual_seed(3)
    part = PatchPredictor(encoder, part="decoder", width=width, depth=2, heads=3, out_features=out_features)
    with torch.no_grad():
        for bias in (part.embedding.bias, part.output.bias):
            bias.normal_()
        part.mask_token.normal_()
    return part


def mask_of(batch, *, visible, blocks, m, patches, seed=0):
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(batch, patches, generator=generator).argsort(dim=1)
    targets = torch.stack([order[:, visible + block : visible + block + m] for block in range(blocks)], dim=1)
    return Mask(torch.empty(batch, patches), order[:, :visible], targets)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_transformer_on_tokens_in_order(kind):
    encoder = vit(**kind).double()
    part = predictor(encoder).double()
    mask = mask_of(3, visible=5, blocks=4, m=3, patches=16)
    tokens = torch.randn(3, encoder.num_prefix_tokens + 5, 8, dtype=torch.float64)
    found = part(tokens, mask)
    assert found.shape == (3, 4, 3, 5)
    visible, targets = mask.indices
    for image in range(3):
        for block in range(4):
            expected = slow_prediction(part, tokens[image], visible[image], targets[image, block], side=4)
            torch.testing.assert_close(found[image, block], expected, rtol=1e-9, atol=1e-9)


def test_positions_of_a_smaller_view_are_interpolated():
    encoder = vit(pool="mean", size=16)  # 8 x 8 patches
    part = predictor(encoder)
    mask = mask_of(2, visible=4, blocks=1, m=2, patches=16)
    tokens = torch.randn(2, 4, 8)
    found = part(tokens, mask)
    part.positions = interpolate_positions(sincos_position_embedding(8, 12)[None], 4)
    torch.testing.assert_close(found, part(tokens, mask), rtol=0, atol=0)


def test_a_prediction_depends_on_its_own_visible_patches():
    part = predictor(vit(pool="mean"))
    mask = mask_of(2, visible=5, blocks=2, m=3, patches=16)
    tokens = torch.randn(2, 5, 8, requires_grad=True)
    part(tokens, mask)[0].sum().backward()
    assert tokens.grad[0].norm() > 0
    assert tokens.grad[1].norm() == 0


def test_gathered_positions_follow_their_patches():
    """Predictions of the same patches in another order are the same predictions in that order."""
    part = predictor(vit(pool="mean"))
    mask = mask_of(2, visible=5, blocks=1, m=4, patches=16)
    tokens = torch.randn(2, 5, 8)
    found = part(tokens, mask)
    visible, targets = mask.indices
    turned_mask = Mask(mask.hidden, visible.flip(1), targets.flip(2))
    turned = part(gather_patches(tokens, torch.tensor([[4, 3, 2, 1, 0]] * 2)), turned_mask)
    torch.testing.assert_close(turned.flip(2), found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 14}, "^method.decoder_width=14 must be a multiple of 4 and of method.decoder_heads=2; change one$"),
        ({"heads": 3}, "^method.decoder_width=8 must be a multiple of 4 and of method.decoder_heads=3; change one$"),
    ],
)
def test_wrong_sizes_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        PatchPredictor(vit(), part="decoder", **{"width": 8, "depth": 1, "heads": 2, "out_features": 4, **settings})


def normalized(x: Tensor) -> Tensor:
    mean = x.mean(dim=-1, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()


def slow_block(x: Tensor, state: dict[str, Tensor], heads: int) -> Tensor:
    """Slowly: one block on the tokens ``(tokens, width)`` of an image, query by query."""
    width = x.shape[1] // heads
    y = normalized(x) * state["norm1.weight"] + state["norm1.bias"]
    q, k, v = (y @ state["qkv.weight"].T + state["qkv.bias"]).split(x.shape[1], dim=1)
    attended = torch.zeros_like(x)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        for i in range(len(x)):
            scores = [math.exp(float(q[i, part] @ k[j, part]) / math.sqrt(width)) for j in range(len(x))]
            attended[i, part] = sum(score / sum(scores) * v[j, part] for j, score in enumerate(scores))
    x = x + attended @ state["out.weight"].T + state["out.bias"]
    y = normalized(x) * state["norm2.weight"] + state["norm2.bias"]
    y = y @ state["mlp.0.weight"].T + state["mlp.0.bias"]
    y = y * (1 + torch.erf(y / math.sqrt(2))) / 2  # GELU
    return x + y @ state["mlp.2.weight"].T + state["mlp.2.bias"]


def randomized(transformer: Transformer) -> Transformer:
    """With biases, and scales of normalizations, other than the initial ones."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return transformer


@pytest.mark.parametrize(("depth", "heads"), [(0, 1), (1, 1), (1, 2), (3, 4)])
def test_transformer_equals_the_equations(depth: int, heads: int):
    torch.manual_seed(depth)
    transformer = randomized(Transformer(8, depth=depth, heads=heads))
    state = {name: value.detach().double() for name, value in transformer.state_dict().items()}
    tokens = torch.randn(2, 5, 8)
    expected = []
    for x in tokens.double():
        for block in range(depth):
            own = {name.removeprefix(f"{block}."): value for name, value in state.items() if name[0] == str(block)}
            x = slow_block(x, own, heads)
        expected.append(normalized(x) * state[f"{depth}.weight"] + state[f"{depth}.bias"])
    torch.testing.assert_close(transformer(tokens), torch.stack(expected).float(), rtol=0, atol=1e-4)


def test_number_of_weights_by_hand():
    """A block of width d has 12 d^2 + 13 d weights: attention 4 (d^2 + d), MLP 8 d^2 + 5 d, normalizations 4 d."""
    sizes = [parameter.numel() for parameter in Transformer(12, depth=3, heads=3).parameters()]
    assert sum(sizes) == 3 * (12 * 12**2 + 13 * 12) + 2 * 12
