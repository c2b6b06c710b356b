"""Supervised training of a classifier end to end: Dec-SL (Wang et al., arXiv 2210.10947), the bound with labels.

Its accuracy on the test images is Dec-SL. Dec-SLRep is its encoder under the same evaluation protocols as all other
encoders. All views of an image are classified: two by default, so that a step processes the same number of images as a
self-supervised method; the authors classify one. Images without a label have no loss.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.datasets.holdout import NO_LABEL
from fedssl.encoders import Encoder
from fedssl.errors import InputError
from fedssl.methods.base import SSLMethod
from fedssl.views import AcceptedViews, Views


class Supervised(SSLMethod):
    r"""Encoder and linear classifier. All V views are concatenated into one forward pass.

    $$
    \mathcal{L} = -\frac{1}{Vn} \sum_{i=1}^{Vn} \log \operatorname{softmax}(W h_i + b)_{y_i}
    $$

    with $h_i$ the representation of a view, $y_i$ the class of its image, and W, b the classifier.
    """

    uses_labels = True
    accepted_views = AcceptedViews(min_global=1, max_global=None)
    equal_global_sizes = True

    def __init__(self, encoder: Encoder, *, num_classes: int | None) -> None:
        if num_classes is None or num_classes < 1:
            raise InputError(
                f"dataset.num_classes={'null' if num_classes is None else num_classes} but method=supervised needs "
                "the number of classes; set dataset.num_classes"
            )
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(encoder.feature_dim, num_classes)

    def loss(self, views: Views) -> Tensor:
        """Return the mean cross entropy over the views of the images with a label, 0 if there are none."""
        assert views.labels is not None  # see `uses_labels`
        logits = self.classifier(self.encoder(torch.cat(views.images)))
        loss = F.cross_entropy(logits.float(), views.labels.repeat(len(views)), ignore_index=NO_LABEL)
        return torch.where((views.labels != NO_LABEL).any(), loss, torch.zeros_like(loss))

    def classify(self, h: Tensor) -> Tensor:
        logits: Tensor = self.classifier(h)
        return logits
