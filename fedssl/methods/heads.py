"""Heads: small networks between a representation h and the loss (projector, predictor)."""

from itertools import pairwise

from torch import nn

from fedssl.config.constraints import check_arguments


class MLP(nn.Sequential):
    """Linear layers with ReLU and, by default, batch normalization between them.

    The papers' heads are special cases: ``num_layers=1`` is the linear head of L-DAWA, ``num_layers=2`` are the
    projectors of SimCLR and BYOL, ``num_layers=3, last_batch_norm=True`` those of SimSiam and MoCo v3.

    Parameters
    ----------
    in_features, hidden_dim, out_dim : int
        Lengths of the input, hidden and output vectors; ``hidden_dim`` is unused with one layer.
    num_layers : int
        Number of linear layers.
    batch_norm : bool
        Whether batch normalization follows every layer but the last; FedX's heads have none.
    last_batch_norm : bool
        Whether batch normalization without scale and shift follows the last layer.
    """

    def __init__(
        self,
        in_features: int,
        *,
        hidden_dim: int,
        out_dim: int,
        num_layers: int = 2,
        batch_norm: bool = True,
        last_batch_norm: bool = False,
    ) -> None:
        check_arguments("method", hidden_dim=hidden_dim, out_dim=out_dim, num_layers=num_layers)
        super().__init__()
        widths = [in_features, *[hidden_dim] * (num_layers - 1), out_dim]
        for before, after in pairwise(widths[:-1]):
            # No bias before a normalization, which would remove it.
            normalization = [nn.BatchNorm1d(after)] if batch_norm else []
            self.extend([nn.Linear(before, after, bias=not batch_norm), *normalization, nn.ReLU(inplace=True)])
        self.append(nn.Linear(widths[-2], out_dim, bias=not last_batch_norm))
        if last_batch_norm:
            self.append(nn.BatchNorm1d(out_dim, affine=False))
        self.out_features = out_dim  # as in torch's layers
