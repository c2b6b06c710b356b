"""Bottleneck adapters (Houlsby et al., arXiv 1902.00751) after the stages of a frozen encoder."""

from fedssl.encoders.base import Encoder


def adapter(encoder: Encoder, *, bottleneck: int, blocks: int | None = None) -> None:
    r"""Train an adapter after each of the last ``blocks`` stages, see `fedssl.encoders.adapters.Adapter`.

    In a vision transformer, whose stages are its blocks, they are where Pfeiffer et al. (arXiv 2005.00247) place them:
    one per block, after the feed-forward layers. In a convolutional network they are 1x1 convolutions with a shortcut,
    as those of Rebuffi et al. (arXiv 1705.08045), but one per stage and with a bottleneck.

    $$
    h \leftarrow h + U \operatorname{GELU}(D h + a) + b \qquad U_0 = 0, \; b_0 = 0
    $$

    with h the vector of a position or token in a stage's output, and D, a, U, b the trained weights and biases.

    Parameters
    ----------
    encoder : Encoder
        The new encoder. Its layers become base layers.
    bottleneck : int
        Length of the hidden layer of an adapter.
    blocks : int or None
        Number of stages with an adapter. The stages before them run once for all networks of a method. None: all.
    """
    base = list(encoder.state_dict())
    encoder.add_adapters(bottleneck=bottleneck, blocks=blocks)
    encoder.freeze_base(base, stages=len(encoder.stage_names) - len(encoder.adapters))
