"""Encoders of torchvision: its networks and the blocks of its vision transformer, and bad input."""

import pytest
import torch
from torchvision import models
from torchvision.models.vision_transformer import EncoderBlock

from fedssl import encoders
from fedssl.encoders import vit_tiny
from fedssl.encoders.torchvision_networks import build_torchvision
from fedssl.errors import InputError

WIDTH, PATCH, SIZE = 12, 4, 16


@pytest.mark.parametrize(
    ("name", "size", "stages"), [("resnet18", 64, 4), ("efficientnet_b0", 64, 7), ("mobilenet_v3_small", 64, 1)]
)
def test_torchvision_encoders_are_torchvisions_networks(name, size, stages):
    encoder, images = build_torchvision(name, channels=3, size=size).eval(), torch.rand(2, 3, size, size)
    theirs = models.get_model(name).eval()
    ours = encoder.state_dict()
    assert [key for key in theirs.state_dict() if key not in ours] in (
        ["fc.weight", "fc.bias"],
        ["classifier.1.weight", "classifier.1.bias"],
        ["classifier.3.weight", "classifier.3.bias"],
    )
    theirs.load_state_dict(ours, strict=False)
    inputs = []  # of the classifier
    list(theirs.modules())[-1].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad():
        theirs(images)
        torch.testing.assert_close(encoder(images), inputs[0], rtol=0, atol=1e-6)
    assert len(encoder.stage_names) == stages


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet19", "is not a classification network of torchvision.*did you mean"),
        ("fcn_resnet50", "is not a classification network"),
        ("squeezenet1_0", "its classifier has no linear layer"),
        ("googlenet", "its output is GoogLeNetOutputs instead of one vector"),
    ],
)
@pytest.mark.filterwarnings("ignore:The default weight initialization")
def test_bad_names_and_sizes_are_rejected(name, message):
    with pytest.raises(InputError, match=message):
        encoders.torchvision(name=name, channels=3, size=32)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("heads", [2, 3])
def test_stages_equal_torchvisions_blocks(heads: int, training: bool):
    """Outputs and gradients; torchvision's block has the same names of weights."""
    encoder = vit_tiny(channels=3, size=SIZE, patch=PATCH, depth=1, width=WIDTH, heads=heads)
    (stage,) = encoder.stage_modules()
    block = EncoderBlock(heads, WIDTH, 4 * WIDTH, dropout=0.0, attention_dropout=0.0)
    assert type(stage.self_attention) is not type(block.self_attention)
    state = {name: torch.randn_like(weight) / 2 for name, weight in block.state_dict().items()}
    results = []
    for module in (stage, block):
        module.load_state_dict(state)
        module.train(training)
        tokens = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        output = module(tokens)
        output.square().sum().backward()
        with torch.no_grad():
            results.append([output, module(tokens), tokens.grad, *(weight.grad for weight in module.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_other_calls_of_attention_are_those_of_torch():
    (stage,) = vit_tiny(channels=3, size=SIZE, patch=PATCH, depth=1, width=WIDTH, heads=3).stage_modules()
    layer = torch.nn.MultiheadAttention(WIDTH, 3, batch_first=True)
    layer.load_state_dict(stage.self_attention.state_dict())
    x, other = torch.randn(2, 2, 5, WIDTH)
    mask = torch.tensor([False, False, True, False, True]).expand(2, 5)
    for inputs, options in (
        ((x, x, x), {}),
        ((x, other, other), {"need_weights": False}),
        ((x, x, x), {"need_weights": False, "key_padding_mask": mask}),
        ((x, x, x), {"need_weights": False, "attn_mask": torch.ones(5, 5).triu(1).bool(), "is_causal": True}),
    ):
        torch.testing.assert_close(stage.self_attention(*inputs, **options), layer(*inputs, **options))
