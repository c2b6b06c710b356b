"""The predictor of hidden patches: its numbers, positions, and separate target blocks."""

import pytest
import torch

from fedssl.encoders.tokens import gather_patches, interpolate_positions, sincos_position_embedding
from fedssl.errors import InputError
from fedssl.methods.patch_prediction import PatchPredictor
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


def indices(batch, *, visible, blocks, m, patches, seed=0):
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(batch, patches, generator=generator).argsort(dim=1)
    targets = torch.stack([order[:, visible + block : visible + block + m] for block in range(blocks)], dim=1)
    return order[:, :visible], targets


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_transformer_on_tokens_in_order(kind):
    encoder = vit(**kind).double()
    part = predictor(encoder).double()
    visible, targets = indices(3, visible=5, blocks=4, m=3, patches=16)
    tokens = torch.randn(3, encoder.num_prefix_tokens + 5, 8, dtype=torch.float64)
    found = part(tokens, visible=visible, targets=targets, patches=16)
    assert found.shape == (3, 4, 3, 5)
    for image in range(3):
        for block in range(4):
            expected = slow_prediction(part, tokens[image], visible[image], targets[image, block], side=4)
            torch.testing.assert_close(found[image, block], expected, rtol=1e-9, atol=1e-9)


def test_positions_of_a_smaller_view_are_interpolated():
    encoder = vit(pool="mean", size=16)  # 8 x 8 patches
    part = predictor(encoder)
    visible, targets = indices(2, visible=4, blocks=1, m=2, patches=16)
    tokens = torch.randn(2, 4, 8)
    found = part(tokens, visible=visible, targets=targets, patches=16)
    part.positions = interpolate_positions(sincos_position_embedding(8, 12)[None], 4)
    torch.testing.assert_close(found, part(tokens, visible=visible, targets=targets, patches=16), rtol=0, atol=0)


def test_a_prediction_depends_on_its_own_visible_patches():
    part = predictor(vit(pool="mean"))
    visible, targets = indices(2, visible=5, blocks=2, m=3, patches=16)
    tokens = torch.randn(2, 5, 8, requires_grad=True)
    part(tokens, visible=visible, targets=targets, patches=16)[0].sum().backward()
    assert tokens.grad[0].norm() > 0
    assert tokens.grad[1].norm() == 0


def test_gathered_positions_follow_their_patches():
    """Predictions of the same patches in another order are the same predictions in that order."""
    part = predictor(vit(pool="mean"))
    visible, targets = indices(2, visible=5, blocks=1, m=4, patches=16)
    tokens = torch.randn(2, 5, 8)
    found = part(tokens, visible=visible, targets=targets, patches=16)
    turned = part(
        gather_patches(tokens, torch.tensor([[4, 3, 2, 1, 0]] * 2)),
        visible=visible.flip(1),
        targets=targets.flip(2),
        patches=16,
    )
    torch.testing.assert_close(turned.flip(2), found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 0}, "^method.decoder_width=0 must be an integer from 1 to 65536$"),
        ({"depth": 0}, "^method.decoder_depth=0 must be an integer from 1 to 1000$"),
        ({"heads": 0}, "^method.decoder_heads=0 must be an integer from 1 to 65536$"),
        ({"width": 14}, "^method.decoder_width=14 must be a multiple of 4 and of method.decoder_heads=2; change one$"),
        ({"heads": 3}, "^method.decoder_width=8 must be a multiple of 4 and of method.decoder_heads=3; change one$"),
    ],
)
def test_wrong_sizes_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        PatchPredictor(vit(), part="decoder", **{"width": 8, "depth": 1, "heads": 2, "out_features": 4, **settings})
