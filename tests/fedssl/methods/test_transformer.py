"""The transformer of decoders and predictors."""

import math

import pytest
import torch
from torch import Tensor

from fedssl.errors import InputError
from fedssl.methods.transformer import Transformer


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


def test_heads_that_do_not_divide_the_width_are_one_sentence():
    with pytest.raises(InputError, match="^a transformer has heads=3 but width=8 is no multiple of it; change one$"):
        Transformer(8, depth=1, heads=3)
