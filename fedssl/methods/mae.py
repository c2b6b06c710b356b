"""MAE (He et al., arXiv 2111.06377): reconstruct the pixels of hidden patches.

Most patches of a view are hidden at random. The encoder processes the visible patches only. The decoder, a narrow
transformer, receives the encoder's tokens and a mask token in place of each hidden patch, and predicts the pixels of
the hidden patches. Only the encoder is evaluated and exported, on all patches.

Differences from the authors' code:

- The decoder predicts the hidden patches only; theirs also computes the pixels of visible ones, which the loss ignores.
- Hidden patches follow the visible ones in the decoder instead of being sorted into them, which changes nothing.
- Positions are those of `fedssl.encoders.tokens.sincos_position_embedding`, in another order of the same numbers.
- The encoder is initialized as for the other methods.
"""

from dataclasses import replace

from torch import Tensor

from fedssl.encoders import Encoder
from fedssl.encoders.tokens import TokenEncoder, gather_patches
from fedssl.errors import InputError
from fedssl.losses import masked_reconstruction, patchify
from fedssl.losses.masked_images import standardize_patches
from fedssl.methods.base import FailureMode, SSLMethod
from fedssl.methods.patch_prediction import PatchPredictor, encode_visible, require_tokens
from fedssl.views import AcceptedViews, Mask, View, Views


def explained_variance(prediction: Tensor, target: Tensor) -> float:
    """Return the share of the targets' variance over images that predictions explain, at most 1.

    It is ``1 - mean((p - t)^2) / mean((t - m)^2)`` with m the mean of a number over images, and 0 for the prediction m.
    Both are ``(batch, ...)``. Constant targets give 0.
    """
    prediction, target = prediction.double(), target.double()
    variance = target.var(dim=0, correction=0).mean().item()
    return 1 - (prediction - target).square().mean().item() / variance if variance else 0.0


def equal_mask(mask: Mask) -> Mask:
    """Return the mask of the first image for all images, with indices."""
    return Mask(*(part[:1].expand_as(part) for part in (mask.hidden, *mask.indices)))


class MAE(SSLMethod):
    r"""A masked autoencoder: encoder of the visible patches, and decoder of the hidden ones.

    Encoder and decoder are exchanged and averaged. With ``exchange_decoder`` false the decoder stays with the client.
    It starts in the client's first round with the weights of the newly built method, which are equal for all clients.

    $$
    \hat{x}_i = g \left( \{ f(x_i)_p + \pi_p \}_{p \in V_i}, \{ e + \pi_p \}_{p \in M_i} \right) \qquad
    t_{i,p} = \frac{x_{i,p} - \mu_{i,p}}{\sqrt{\sigma_{i,p}^2 + 10^{-6}}}
    $$

    $$
    \mathcal{L} = \frac{1}{n} \sum_{i=1}^{n} \frac{1}{|M_i|} \sum_{p \in M_i} \frac{1}{d}
    \lVert \hat{x}_{i,p} - t_{i,p} \rVert^2
    $$

    with $V_i$ and $M_i$ the visible and hidden patches of image i, f the encoder, g the decoder, e the mask token,
    $\pi_p$ the position of patch p, and $t_{i,p}$ its d standardized pixels (divisor d - 1) or, without
    ``normalize_patches``, its pixels.
    """

    encoder: TokenEncoder
    accepted_views = AcceptedViews(min_global=1, max_global=1, masks=("random",), augmentation="mae")
    masks_patches = True
    min_batch_size = 1  # patches of an image predict each other, and layer normalization needs no other image
    regularized_parts = ()
    failure_modes: tuple[FailureMode, ...] = (
        FailureMode(
            diagnostic="explained_variance",
            minimum=0.02,
            message="the decoder predicts hidden patches no better than their mean over images; raise rounds or "
            "optimizer.lr, or lower the mask's ratio in augmentation.views",
        ),
    )

    def __init__(
        self,
        encoder: Encoder,
        *,
        decoder_width: int,
        decoder_depth: int,
        decoder_heads: int,
        normalize_patches: bool = True,
        exchange_decoder: bool = True,
    ) -> None:
        super().__init__()
        self.encoder = require_tokens(
            encoder, method=type(self).__name__, augmentation=self.accepted_views.augmentation
        )
        assert encoder.channels is not None
        pixels = self.encoder.patch_size**2 * encoder.channels
        if normalize_patches and pixels == 1:
            raise InputError(
                "method.normalize_patches=true standardizes the pixels of a patch, but encoder.patch=1 has a "
                "single one; set method.normalize_patches=false or encoder.patch=2"
            )
        self.decoder = PatchPredictor(
            self.encoder,
            part="decoder",
            width=decoder_width,
            depth=decoder_depth,
            heads=decoder_heads,
            out_features=pixels,
        )
        self.normalize_patches = normalize_patches
        if not exchange_decoder:
            self.keep_local("decoder")
            self.failure_modes = ()  # of the decoder, which is not part of the global model

    def loss(self, views: Views) -> Tensor:
        prediction, patches = self.predict(views[0])
        return masked_reconstruction(prediction, patches, normalize=self.normalize_patches)

    def predict(self, view: View) -> tuple[Tensor, Tensor]:
        """Return the predicted and the true pixels of the hidden patches, each ``(batch, hidden, pixels)``."""
        return self.decode(view, *encode_visible(self.encoder, view))

    def decode(self, view: View, tokens: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Return the same as `predict`, from the result of `encode_visible`."""
        patches = patchify(view.images, self.encoder.patch_size)
        return self.decoder(tokens, mask).flatten(1, 2), gather_patches(patches, mask.indices[1].flatten(1))

    def diagnose(self, views: Views) -> dict[str, float]:
        """Return the explained variance of the pixels of the same hidden patches of all images."""
        assert views[0].mask is not None
        prediction, patches = self.predict(replace(views[0], mask=equal_mask(views[0].mask)))
        target = standardize_patches(patches) if self.normalize_patches else patches
        return {"explained_variance": explained_variance(prediction, target)}
