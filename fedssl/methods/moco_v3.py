"""MoCo v3 (Chen et al., arXiv 2104.02057): tell, from one view, which picture of the batch the other view is of.

LW-FedSSL trains with it. The loss has the factor 2 temperature of the authors' code, which LW-FedSSL's Eq. 2 leaves
out; it makes losses of different temperatures comparable and matters where another loss is added.
"""

from collections.abc import Callable

from torch import Tensor

from fedssl.encoders import Encoder
from fedssl.errors import InputError
from fedssl.losses import info_nce
from fedssl.methods.heads import MLP
from fedssl.methods.momentum import MomentumMethod


class MoCoV3(MomentumMethod):
    """MoCo v3; for other parameters see `MomentumMethod`.

    Parameters
    ----------
    temperature : float
        Of the loss; positive.
    train_patches : bool
        Whether the patch embedding of a vision transformer is trained; MoCo v3 leaves it at its random start for
        stability. Means nothing for other encoders.

    Raises
    ------
    InputError
        If ``temperature`` is not positive; see also `MomentumMethod`.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        projector: Callable[[int], MLP],
        predictor: Callable[[int], MLP],
        temperature: float,
        ema_decay: float,
        target: str = "keep",
        train_patches: bool = True,
    ) -> None:
        if temperature <= 0:
            raise InputError(f"method.temperature={temperature} must be positive; MoCo v3 uses 0.2")
        if not train_patches and encoder.patch_embedding is not None:
            encoder.get_submodule(encoder.patch_embedding).requires_grad_(False)
        super().__init__(encoder, projector=projector, predictor=predictor, ema_decay=ema_decay, target=target)
        self.temperature = temperature

    def loss(self, view1: Tensor, view2: Tensor) -> Tensor:
        p1, p2, z1, z2 = self.passes(view1, view2)
        losses = [info_nce(q, k, temperature=self.temperature) for q, k in ((p1, z2), (p2, z1))]
        return 2 * self.temperature * (losses[0] + losses[1])
