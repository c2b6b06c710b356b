"""Tunings of all parameters, none, the last stages, normalization layers, biases, or adapters."""

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedssl.config.constraints import check_arguments
from fedssl.encoders.base import Encoder
from fedssl.errors import InputError

_NORMALIZATIONS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def full(encoder: Encoder, *, freeze_statistics: bool = False) -> None:
    """Train all parameters of the encoder.

    ``freeze_statistics`` keeps the initial running statistics of batch normalization, which then uses them in training
    as well: of few images, of augmented views or of one client they differ from those of the images that are embedded.
    """
    check_arguments("tuning", freeze_statistics=freeze_statistics)
    if freeze_statistics:
        encoder.freeze_base(_statistics(encoder))


def head_only(encoder: Encoder) -> None:
    """Train no layer of the encoder, only the method's heads."""
    encoder.freeze_base(encoder.state_dict(), stages=len(encoder.stage_names))


def last_blocks(encoder: Encoder, *, blocks: int, freeze_statistics: bool = True) -> None:
    """Train the last ``blocks`` stages and what follows them, such as the last layer normalization of a transformer.

    ``freeze_statistics`` as in `full`.
    """
    check_arguments("tuning", blocks=blocks, freeze_statistics=freeze_statistics)
    stages = len(encoder.stage_names)
    if blocks >= stages:
        raise InputError(
            f"tuning.blocks={blocks} but the encoder has {stages} stages; set tuning.blocks below {stages}, or "
            "tuning=full"
            if stages > 1
            else "tuning=last_blocks but the encoder has a single stage; set tuning=full or another tuning"
        )
    frozen = stages - blocks
    names = [name for name in encoder.state_dict() if encoder.stage_range(name).frozen_from <= frozen]
    encoder.freeze_base({*names, *(_statistics(encoder) if freeze_statistics else ())}, stages=frozen)


def norm(encoder: Encoder, *, freeze_statistics: bool = True) -> None:
    """Train scale and shift of normalization layers; ``freeze_statistics`` as in `full`.

    Frankle et al., *Training BatchNorm and Only BatchNorm*, arXiv 2003.00152; for transformers the same layers are
    those of LayerNorm tuning (Zhao et al., arXiv 2312.11420).
    """
    check_arguments("tuning", freeze_statistics=freeze_statistics)
    normalizations = {
        name for name, module in encoder.named_modules() if isinstance(module, _NORMALIZATIONS) and module.state_dict()
    }
    trained = {name for name in encoder.state_dict() if name.rpartition(".")[0] in normalizations}
    trained -= _statistics(encoder) if freeze_statistics else set()
    _train_only(encoder, trained, tuning="norm", layers="normalization layers with a scale")


def bias(encoder: Encoder) -> None:
    """Train the biases (BitFit, Ben Zaken et al., arXiv 2106.10199).

    The shift of normalization layers is a bias. Their running statistics are frozen, because their scale is.
    """
    trained = {name for name, _ in encoder.named_parameters() if name.endswith("bias")}
    _train_only(encoder, trained, tuning="bias", layers="biases")


def adapter(encoder: Encoder, *, bottleneck: int, blocks: int | None = None) -> None:
    r"""Train an adapter after each of the last ``blocks`` stages, see `fedssl.encoders.base.Adapter`.

    In a vision transformer, whose stages are its blocks, they are where Pfeiffer et al. (arXiv 2005.00247) place them:
    one per block, after the feed-forward layers. In a convolutional network they are 1x1 convolutions with a shortcut,
    as those of Rebuffi et al. (arXiv 1705.08045), but one per stage and with a bottleneck.

    $$
    h \leftarrow h + U \operatorname{GELU}(D h + a) + b \qquad U_0 = 0, \; b_0 = 0
    $$

    with h the vector of a position or token in a stage's output, and D, a, U, b the trained weights and biases.

    ``bottleneck`` is the length of the hidden layer of an adapter. The stages before the last ``blocks`` run once for
    all networks of a method. None: all stages have an adapter.
    """
    base = list(encoder.state_dict())
    encoder.add_adapters(bottleneck=bottleneck, blocks=blocks)
    encoder.freeze_base(base, stages=len(encoder.stage_names) - len(encoder.adapters))


def _train_only(encoder: Encoder, trained: set[str], *, tuning: str, layers: str) -> None:
    if not any(name in trained for name, _ in encoder.named_parameters()):
        raise InputError(f"tuning={tuning} but the encoder has no {layers}; set another tuning, such as last_blocks")
    encoder.freeze_base([name for name in encoder.state_dict() if name not in trained])


def _statistics(encoder: Encoder) -> set[str]:
    """Return the names of the buffers of batch normalization."""
    return {
        f"{path}.{name}".removeprefix(".")
        for path, module in encoder.named_modules()
        if isinstance(module, _NormBase)
        for name, _ in module.named_buffers(recurse=False)
    }
