"""Kernels for other numbers of channels, and position embeddings for other image sizes."""

import pytest
import torch

from fedssl.encoders import timm, vit_tiny
from fedssl.pretrained.adapting import adapt_channels, adapt_positions, adapt_tensor


def test_one_channel_is_the_sum_by_hand():
    weight = torch.tensor([1.0, 2.0, 4.0]).reshape(1, 3, 1, 1)
    assert adapt_channels(weight, 1).flatten().tolist() == [7.0]
    # Two and four channels: 1 2 and 1 2 4 1, times 3/2 and 3/4.
    assert adapt_channels(weight, 2).flatten().tolist() == [1.5, 3.0]
    assert adapt_channels(weight, 4).flatten().tolist() == [0.75, 1.5, 3.0, 0.75]
    assert adapt_channels(weight[:, :1], 3).flatten().tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_positions_are_interpolated_and_tokens_before_them_kept(prefix):
    """Bicubically: 2 x 2 patches (a, b; c, d) become 1 x 1 in their middle, whose weights are those of t = 0.5.

    With Keys' kernel and A = -0.75, weights of the four neighbors along an axis are -0.09375, 0.59375, 0.59375,
    -0.09375; the outer neighbors repeat the border, so that both values have 0.5: the mean of a, b, c and d.
    """
    tokens = torch.rand(1, prefix, 3)
    patches = torch.tensor([1.0, 2.0, 3.0, 10.0]).reshape(1, 4, 1).expand(1, 4, 3)
    adapted = adapt_positions(torch.cat((tokens, patches), dim=1), side=1, prefix=prefix)
    assert torch.equal(adapted[:, :prefix], tokens)
    torch.testing.assert_close(adapted[0, prefix:], torch.full((1, 3), 4.0))


@pytest.mark.parametrize(
    ("encoder", "name", "tokens"),
    [
        (vit_tiny(channels=3, size=16, depth=1, width=8, heads=1), "encoder.pos_embedding", 1 + 4**2),
        (timm(name="test_vit", channels=3, size=32), "pos_embed", 1 + 2**2),
        (timm(name="test_vit2", channels=3, size=32), "pos_embed", None),
    ],
)
def test_encoders_get_positions_of_their_size(encoder, name, tokens):
    template = encoder.state_dict()[name]
    width, prefix = template.shape[2], template.shape[1] - (2 if name == "pos_embed" else 4) ** 2
    value = torch.rand(1, prefix + 9**2, width)
    adapted = adapt_tensor(name, value, encoder, template, first_kernel="")
    assert adapted.shape == template.shape
    assert tokens in (None, adapted.shape[1])
    torch.testing.assert_close(adapted[:, :prefix], value[:, :prefix])


def test_other_shapes_do_not_fit():
    encoder = vit_tiny(channels=1, size=16, depth=1, width=8, heads=1)
    template = encoder.state_dict()
    kernel, bias = template["conv_proj.weight"], template["conv_proj.bias"]
    arguments = {"encoder": encoder, "first_kernel": "conv_proj.weight"}
    three = torch.rand(8, 3, 4, 4)
    adapted = adapt_tensor("conv_proj.weight", three, template=kernel, **arguments)
    torch.testing.assert_close(adapted, three.sum(1, keepdim=True))
    assert adapt_tensor("conv_proj.weight", torch.rand(8, 3, 2, 2), template=kernel, **arguments) is None
    assert adapt_tensor("other.weight", three, template=kernel, **arguments) is None  # only the first kernel
    assert adapt_tensor("conv_proj.bias", torch.rand(9), template=bias, **arguments) is None


def test_positions_of_the_same_square_and_without_prefix():
    patches = torch.rand(1, 9, 4)
    assert torch.equal(adapt_positions(patches, side=3, prefix=0), patches)
    with_token = adapt_positions(patches, side=3, prefix=1)  # the source has no position for the class token
    assert torch.equal(with_token[:, 1:], patches)
    assert with_token[:, :1].eq(0).all()
    assert adapt_positions(torch.rand(1, 9 + 5, 4), side=3, prefix=1) is None  # registers that the encoder lacks
