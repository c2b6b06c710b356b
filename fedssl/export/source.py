"""What is exported: an encoder, what its file says of it, and the run that it comes from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedssl.export.encoder_file import Preprocess
from fedssl.runs.run import Run
from fedssl.seeding import torch_generator


@dataclass(frozen=True, eq=False, kw_only=True)
class ExportSource:
    """An encoder to be exported.

    Attributes
    ----------
    encoder : nn.Module
        As `fedssl.export.load_encoder` returns it.
    content : mapping
        What its file holds, as `fedssl.export.read_content` returns it.
    build : callable or None
        What builds the encoder if it is none of fedssl's, as `fedssl.export.load_encoder` takes it.
    run : Run or None
        None: nothing is known but what the file says.
    """

    encoder: Any
    content: Mapping[str, Any]
    build: Callable[..., nn.Module] | None = None
    run: Run | None = None

    @property
    def architecture(self) -> str:
        """Dotted name of what built the encoder."""
        return str(self.content["encoder"].get("_target_"))

    def random_images(self, count: int) -> Tensor:
        """Images ``(count, channels, size, size)`` in uint8, the same in every process."""
        shape = (count, self.encoder.channels, self.encoder.size, self.encoder.size)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch_generator(0, "export"))

    def metadata_dict(self) -> dict[str, Any]:
        """All but the weights, with the length of a representation, as values that JSON can hold."""
        rest = {key: value for key, value in self.content.items() if key != "weights"}
        return {**rest, "feature_dim": self.encoder.feature_dim}


def represent(model: nn.Module, preprocess: Preprocess, images: Tensor) -> Tensor:
    """Representations of images, uint8, by a model in eval mode that takes standardised ones."""
    with torch.no_grad():
        h: Tensor = model(preprocess(images))
    return h


class WithPreprocessing(nn.Module):
    """Images as they are to representations: standardised, then encoded.

    Maps uint8 ``(batch, channels, size, size)`` to ``(batch, feature_dim)``; images of another size are resized
    before. The pre-processing is part of the module, so that no user of an exported one can forget it.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        for name, values in (("mean", encoder.mean), ("std", encoder.std)):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1))
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Representations ``(batch, feature_dim)``."""
        h: Tensor = self.encoder((images.float() / 255 - self.mean) / self.std)
        return h
