"""What models make of images of the server's own, for algorithms that compare models."""

import torch
from torch import Tensor

from fedssl.arrays import Layers
from fedssl.config.settings import DataSettings
from fedssl.datasets.base import load_split
from fedssl.evaluation.features import extract
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import exchanged_names, load_layers
from fedssl.seeding import torch_generator


class ServerFeatureExtractor:
    """Representations of images of the split ``train``, labelled or not; never of test images.

    Parameters
    ----------
    method : SSLMethod
        Models are loaded into it.
    data : DataSettings
    num_images : int
        How many, at most; drawn by the seed.
    device : torch.device
        Where the method is.
    seed : int
    """

    def __init__(
        self, method: SSLMethod, *, data: DataSettings, num_images: int, device: torch.device, seed: int
    ) -> None:
        self._method, self._data, self._device = method, data, device
        found = load_split(data, "train")
        assert found is not None  # an algorithm without them was refused
        order = torch.randperm(len(found.images), generator=torch_generator(seed, "represent"))
        self._images = found.images[order[:num_images]]

    def __call__(self, layers: Layers) -> Tensor:
        """What a model with these layers makes of the images, float32 ``(num_images, feature_dim)``, on the CPU."""
        needed = [name for name in exchanged_names(self._method) if name.startswith("encoder.")]
        load_layers(self._method, {name: layers[name] for name in needed})
        return extract(
            self._method.encoder, self._images, mean=self._data.mean, std=self._data.std, device=self._device
        )
