"""Supervised training, the bound with labels: a classifier end to end (Dec-SL of Wang et al., arXiv 2210.10947).

Its accuracy on the test images is Dec-SL; Dec-SLRep is its encoder under the protocols that every other encoder is
compared by. Both views of an image are classified, so that a step sees as many images as one of the self-supervised
methods does; the authors classify one view.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.encoders import Encoder
from fedssl.errors import InputError
from fedssl.methods.base import SSLMethod


class Supervised(SSLMethod):
    """An encoder and a linear classifier; both views go through the network concatenated.

    Parameters
    ----------
    encoder : Encoder
        Trained in place.
    num_classes : int or None
        Classes of the data set; None, for data sets that do not say, is refused.

    Raises
    ------
    InputError
        If ``num_classes`` is not known, or smaller than 1.
    """

    uses_labels = True

    def __init__(self, encoder: Encoder, *, num_classes: int | None) -> None:
        if num_classes is None or num_classes < 1:
            raise InputError(
                f"dataset.num_classes={'null' if num_classes is None else num_classes} but method=supervised must know "
                "the number of classes; set dataset.num_classes"
            )
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(encoder.feature_dim, num_classes)

    def loss(self, view1: Tensor, view2: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]  # see uses_labels
        """Mean cross entropy over both views; ``labels``: int64, ``(batch,)``."""
        logits = self.classifier(self.encoder(torch.cat((view1, view2))))
        return F.cross_entropy(logits.float(), labels.repeat(2))

    def classify(self, h: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)`` by the classifier."""
        logits: Tensor = self.classifier(h)
        return logits
