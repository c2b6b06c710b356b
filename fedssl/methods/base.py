"""What a self-supervised method is: an encoder, heads, and a loss on two views of the same pictures."""

from torch import Tensor, nn

from fedssl.encoders import Encoder


class SSLMethod(nn.Module):
    """An encoder with the heads and the loss that train it.

    The first component of a ``state_dict`` name tells the part: ``encoder``, ``projector``, ``predictor``,
    ``target_encoder``, ``target_projector``. Parts named in ``kept`` stay with the client between rounds (they are
    its state); all others travel. An optimiser gets the parameters that require a gradient, and no others.

    Attributes
    ----------
    encoder : Encoder
        Maps pictures ``(batch, channels, size, size)`` to representations h ``(batch, feature_dim)``.
    kept : tuple of str
        Parts that never leave the client.
    """

    encoder: Encoder
    kept: tuple[str, ...] = ()

    def loss(self, view1: Tensor, view2: Tensor) -> Tensor:
        """The training loss, a scalar, of two views ``(batch, channels, size, size)`` of the same pictures."""
        raise NotImplementedError

    def start_round(self, *, first: bool) -> None:
        """Prepare for local training after the global layers were loaded; ``first``: nothing was kept from before."""

    def after_step(self) -> None:
        """Follow-up of one optimiser step, e.g. the moving average of a target network."""
