"""The layers of heads."""

from torch import nn

from fedssl.methods.heads import MLP


def kinds(head: MLP) -> list[type]:
    return [type(layer) for layer in head]


def test_mlp_layers() -> None:
    linear, norm, relu = nn.Linear, nn.BatchNorm1d, nn.ReLU
    assert kinds(MLP(5, hidden_dim=7, out_dim=3, num_layers=1)) == [linear]
    assert kinds(MLP(5, hidden_dim=7, out_dim=3)) == [linear, norm, relu, linear]
    plain = MLP(5, hidden_dim=7, out_dim=3, batch_norm=False)
    assert kinds(plain) == [linear, relu, linear]
    assert plain[0].bias is not None
    head = MLP(5, hidden_dim=7, out_dim=3, num_layers=3, last_batch_norm=True)
    assert kinds(head) == [linear, norm, relu, linear, norm, relu, linear, norm]
    assert [layer.weight.shape for layer in head if isinstance(layer, linear)] == [(7, 5), (7, 7), (3, 7)]
    assert head[-1].weight is None
    assert head.out_features == 3
