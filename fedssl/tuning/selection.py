"""Tunings that select parameters of the encoder: all, none, the last stages, normalization layers, or biases."""

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedssl.config.constraints import check_arguments
from fedssl.encoders.base import Encoder
from fedssl.errors import InputError

_NORMALIZATIONS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def full(encoder: Encoder) -> None:
    """Train all parameters of the encoder."""


def head_only(encoder: Encoder) -> None:
    """Train no layer of the encoder, only the method's heads."""
    encoder.freeze_base(encoder.state_dict(), stages=len(encoder.stage_names))


def last_blocks(encoder: Encoder, *, blocks: int) -> None:
    """Train the last ``blocks`` stages and what follows them, such as the last layer normalization of a transformer."""
    check_arguments("tuning", blocks=blocks)
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
    encoder.freeze_base(names, stages=frozen)


def norm(encoder: Encoder) -> None:
    """Train scale and shift of normalization layers, whose running statistics are updated as well.

    Frankle et al., *Training BatchNorm and Only BatchNorm*, arXiv 2003.00152; for transformers the same layers are
    those of LayerNorm tuning (Zhao et al., arXiv 2312.11420).
    """
    normalizations = {
        name for name, module in encoder.named_modules() if isinstance(module, _NORMALIZATIONS) and module.state_dict()
    }
    trained = {name for name in encoder.state_dict() if name.rpartition(".")[0] in normalizations}
    _train_only(encoder, trained, tuning="norm", layers="normalization layers with a scale")


def bias(encoder: Encoder) -> None:
    """Train the biases (BitFit, Ben Zaken et al., arXiv 2106.10199).

    The shift of normalization layers is a bias. Their running statistics are frozen, because their scale is.
    """
    trained = {name for name, _ in encoder.named_parameters() if name.endswith("bias")}
    _train_only(encoder, trained, tuning="bias", layers="biases")


def _train_only(encoder: Encoder, trained: set[str], *, tuning: str, layers: str) -> None:
    if not any(name in trained for name, _ in encoder.named_parameters()):
        raise InputError(f"tuning={tuning} but the encoder has no {layers}; set another tuning, such as last_blocks")
    encoder.freeze_base([name for name in encoder.state_dict() if name not in trained])
