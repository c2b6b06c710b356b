"""Some images of a source, without a copy; a derived class may change them when they are read."""

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fedssl.datasets.images import ImageSource


class SelectedImages(ImageSource):
    """Images of a source at ``rows``, int64 ``(n,)``."""

    def __init__(self, source: ImageSource, rows: Tensor) -> None:
        self.source, self.rows = source, rows.to(source.device)
        self.shape, self.dtype, self.device = (len(rows), *source.shape[1:]), source.dtype, source.device

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        chosen = self.rows[rows if isinstance(rows, slice) else rows.to(self.device)]
        return self.changed(self.source[chosen], chosen)

    def prefetch(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        waiting: deque[Tensor] = deque()

        def chosen() -> Iterator[Tensor]:
            for batch in batches:
                waiting.append(self.rows[batch.to(self.device)])
                yield waiting[-1]

        for images in self.source.prefetch(chosen()):
            yield self.changed(images, waiting.popleft())

    def subset(self, rows: Tensor) -> "SelectedImages":
        return self.of(self.source, self.rows[rows.to(self.device)])

    def to(self, device: torch.device) -> "SelectedImages":
        return self.of(self.source.to(device), self.rows)

    def place(self, device: torch.device) -> "SelectedImages":
        return self.of(self.source.place(device), self.rows)

    def of(self, source: ImageSource, rows: Tensor) -> "SelectedImages":
        """Return images of another source, or at other rows of it, with the same changes."""
        return SelectedImages(source, rows)

    def changed(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return the images that belong to these rows of the source."""
        return images
