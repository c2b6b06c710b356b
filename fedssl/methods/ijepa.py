"""I-JEPA (Assran et al., arXiv 2301.08243): predict the features of target blocks of an image from a context block.

The context encoder processes the visible patches of a view only. The target encoder, its moving average, processes all
patches. The predictor, a narrow transformer, receives the tokens of the context and a mask token in place of each patch
of a target block, and predicts the target encoder's features of these patches.

Differences from the authors' code:

- The decay of the target increases over rounds instead of steps (``ema_schedule="cosine"``, along a cosine instead of a
  line), or is constant, the default.
- The weight decay is constant; the authors' increases.
- The authors' encoder has no class token (``encoder.pool=mean``). With one, it takes part in attention, also in the
  predictor, and no feature of it is predicted.
- The predictor is initialized as MAE's decoder, and the encoder as for the other methods.

The sizes of context and targets differ between batches, in more combinations than CUDA graphs can be kept for: 14x14
patches have hundreds, and each would be captured after three eager steps (`fedssl.machine.cuda_graphs`). Steps are
therefore not captured.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.encoders import Encoder
from fedssl.encoders.tokens import TokenEncoder, gather_patches
from fedssl.losses import at_least_float32, ijepa
from fedssl.methods.base import FailureMode
from fedssl.methods.momentum import EMAMethod
from fedssl.methods.patch_prediction import PatchPredictor, encode_visible, require_tokens
from fedssl.views import AcceptedViews, Views


def feature_variances(features: Tensor) -> tuple[float, float]:
    """Return two variances of the standardized features of patches ``(batch, patches, dim)``, each in [0, 1].

    The first is that over images, for each patch and feature. The second is that over the patches of an image, for each
    feature. Both are means, 0 if features do not depend on the image or on the patch.
    """
    features = F.layer_norm(at_least_float32(features), features.shape[-1:])  # as targets of the loss
    over_images, over_patches = (features.var(dim=dim, correction=0).mean().item() for dim in (0, 1))
    return over_images, over_patches


class IJEPA(EMAMethod):
    r"""Context encoder, predictor, and target encoder.

    Encoder and predictor are exchanged and averaged. The target encoder stays with the client unless
    ``target_init="average"``. With ``exchange_predictor`` false the predictor stays with the client, too; it starts in
    the client's first round, and in the first round of each stage, with the weights of the newly built method, which
    are equal for all clients.

    $$
    \hat{s}_{i,k} = g \left( \{ f_\theta(x_i)_p + \pi_p \}_{p \in C_i}, \{ e + \pi_p \}_{p \in B_{i,k}} \right) \qquad
    \mathcal{L} = \frac{1}{nK} \sum_{i=1}^{n} \sum_{k=1}^{K} \frac{1}{|B_{i,k}| \, d}
    \sum_{p \in B_{i,k}} \sum_{j=1}^{d} \rho(\hat{s}_{i,k,p,j} - s_{i,p,j})
    $$

    with $C_i$ the context of image i, $B_{i,k}$ its K target blocks, $f_\theta$ the encoder, g the predictor, e the
    mask token, $\pi_p$ the position of patch p, $s_{i,p}$ its d standardized features by the target encoder
    (`fedssl.methods.momentum.EMATargetMethod`), and $\rho(u)$ the smooth L1 distance.
    """

    encoder: TokenEncoder
    target_encoder: TokenEncoder
    accepted_views = AcceptedViews(min_global=1, max_global=1, masks=("multi_block",), augmentation="ijepa")
    masks_patches = True
    min_batch_size = 1  # patches of an image predict each other, and layer normalization needs no other image
    regularized_parts = ()
    cuda_graph_safe = False  # see the module
    failure_modes = (
        FailureMode(
            diagnostic="variance_over_images",
            minimum=0.05,
            message="the target features of all images are equal: the encoder has collapsed; raise method.ema_decay or "
            "lower optimizer.lr",
        ),
        FailureMode(
            diagnostic="variance_over_patches",
            minimum=0.05,
            message="the target features of all patches of an image are equal, so that no position is predicted; raise "
            "method.ema_decay or lower optimizer.lr",
        ),
    )

    def __init__(
        self,
        encoder: Encoder,
        *,
        predictor_width: int,
        predictor_depth: int,
        predictor_heads: int,
        ema_decay: float,
        ema_schedule: str = "constant",
        target_init: str = "persist",
        exchange_predictor: bool = True,
    ) -> None:
        tokens = require_tokens(encoder, method="IJEPA", augmentation=self.accepted_views.augmentation)
        super().__init__(tokens, ema_decay=ema_decay, target_init=target_init, ema_schedule=ema_schedule)
        self.predictor = PatchPredictor(
            self.encoder,
            part="predictor",
            width=predictor_width,
            depth=predictor_depth,
            heads=predictor_heads,
            out_features=encoder.feature_dim,
        )
        self.add_target("encoder")
        if not exchange_predictor:
            self.keep_local("predictor")

    def loss(self, views: Views) -> Tensor:
        (view,) = views
        context, mask = encode_visible(self.encoder, view)
        prediction = self.predictor(context, mask)
        target = gather_patches(self.target_features(view.images), mask.indices[1].flatten(1))
        return ijepa(prediction, target.view_as(prediction))

    @torch.no_grad()
    def target_features(self, images: Tensor) -> Tensor:
        """Return the target encoder's features of all patches, ``(batch, patches, feature_dim)``."""
        tokens = self.target_encoder.forward_tokens(self.target_encoder.embed(images))
        return tokens[:, self.target_encoder.num_prefix_tokens :]

    def diagnose(self, views: Views) -> dict[str, float]:
        """Return the `feature_variances` of the target encoder."""
        over_images, over_patches = feature_variances(self.target_features(views[0].images))
        return {"variance_over_images": over_images, "variance_over_patches": over_patches}
