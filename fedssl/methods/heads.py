"""Heads: small networks between a representation h and the loss (projector, predictor)."""

from itertools import pairwise

from torch import nn

from fedssl.errors import InputError


class MLP(nn.Sequential):
    """Linear layers with ReLU and, by default, batch normalization between them.

    The papers' heads are special cases: ``num_layers=1`` is the linear head of L-DAWA, ``num_layers=2`` are the
    projectors of SimCLR and BYOL, ``num_layers=3, last_batch_norm=True`` those of SimSiam and MoCo v3.

    Parameters
    ----------
    in_features : int
        Length of the input vectors.
    hidden_dim : int
        Length of the hidden vectors; unused with one layer.
    out_dim : int
        Length of the output vectors.
    num_layers : int
        Number of linear layers.
    batch_norm : bool
        Whether batch normalization follows every layer but the last; FedX's heads have none.
    last_batch_norm : bool
        Whether batch normalization without scale and shift follows the last layer.

    Attributes
    ----------
    out_features : int
        ``out_dim``, under the name that torch's own layers use.

    Raises
    ------
    InputError
        If a number is smaller than 1.
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
        if min(hidden_dim, out_dim, num_layers) < 1:
            raise InputError(
                f"a head with hidden_dim={hidden_dim}, out_dim={out_dim} and num_layers={num_layers} cannot be built; "
                "all three must be at least 1, e.g. method.projector.hidden_dim=512"
            )
        super().__init__()
        widths = [in_features, *[hidden_dim] * (num_layers - 1), out_dim]
        for before, after in pairwise(widths[:-1]):
            # No bias before a normalization, which would remove it.
            normalization = [nn.BatchNorm1d(after)] if batch_norm else []
            self.extend([nn.Linear(before, after, bias=not batch_norm), *normalization, nn.ReLU(inplace=True)])
        self.append(nn.Linear(widths[-2], out_dim, bias=not last_batch_norm))
        if last_batch_norm:
            self.append(nn.BatchNorm1d(out_dim, affine=False))
        self.out_features = out_dim
