"""Heads: small networks between a representation h and the loss (projector, predictor)."""

from itertools import pairwise

from torch import nn

from fedssl.errors import InputError


class MLP(nn.Sequential):
    """Linear layers with ReLU and, by default, batch normalization between them.

    The papers' heads are special cases: ``layers=1`` is the linear head of L-DAWA, ``layers=2`` are the projectors of
    SimCLR and BYOL, ``layers=3, last_norm=True`` those of SimSiam and MoCo v3.

    Parameters
    ----------
    in_features : int
        Length of the input vectors.
    hidden : int
        Length of the hidden vectors; unused with one layer.
    out : int
        Length of the output vectors.
    layers : int
        Number of linear layers.
    norm : bool
        Whether batch normalization follows every layer but the last; FedX's heads have none.
    last_norm : bool
        Whether batch normalization without scale and shift follows the last layer.

    Attributes
    ----------
    out_features : int
        ``out``, under the name that torch's own layers use.

    Raises
    ------
    InputError
        If a number is smaller than 1.
    """

    def __init__(
        self, in_features: int, *, hidden: int, out: int, layers: int = 2, norm: bool = True, last_norm: bool = False
    ) -> None:
        if min(hidden, out, layers) < 1:
            raise InputError(
                f"a head with hidden={hidden}, out={out} and layers={layers} cannot be built; "
                "all three must be at least 1, e.g. method.projector.hidden=512"
            )
        super().__init__()
        widths = [in_features, *[hidden] * (layers - 1), out]
        for before, after in pairwise(widths[:-1]):
            # No bias before a normalization, which would remove it.
            normalization = [nn.BatchNorm1d(after)] if norm else []
            self.extend([nn.Linear(before, after, bias=not norm), *normalization, nn.ReLU(inplace=True)])
        self.append(nn.Linear(widths[-2], out, bias=not last_norm))
        if last_norm:
            self.append(nn.BatchNorm1d(out, affine=False))
        self.out_features = out
