"""Some images of a source: their order, those of a part of them, and changes when they are read."""

import pytest
import torch
from torch import Tensor

from fedssl.datasets.images import ImageSource, TensorImages
from fedssl.datasets.selected_images import SelectedImages

IMAGES = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 3, 2, 2).contiguous()
ROWS = torch.tensor([7, 2, 2, 9])
CPU = torch.device("cpu")


class Doubled(SelectedImages):
    """Images plus ten times the row of the source."""

    def of(self, source: ImageSource, rows: Tensor) -> "Doubled":
        return Doubled(source, rows)

    def changed(self, images: Tensor, rows: Tensor) -> Tensor:
        return images + 10 * rows.view(-1, 1, 1, 1).to(torch.uint8)


def values(images: Tensor) -> list[int]:
    return images[:, 0, 0, 0].tolist()


@pytest.mark.parametrize(("kind", "factor"), [(SelectedImages, 1), (Doubled, 11)])
def test_every_access_returns_the_rows_of_the_source(kind, factor):
    chosen = kind(TensorImages(IMAGES), ROWS)
    assert (len(chosen), chosen.shape, chosen.dtype) == (4, (4, 3, 2, 2), torch.uint8)
    expected = [factor * row for row in (7, 2, 2, 9)]
    assert values(chosen[:]) == expected
    assert values(chosen[1:3]) == expected[1:3]
    assert values(chosen[torch.tensor([3, 0])]) == [expected[3], expected[0]]
    assert [values(batch) for batch in chosen.chunks(3)] == [expected[:3], expected[3:]]
    for part in (chosen.subset(torch.tensor([3, 1])), chosen.to(CPU).subset(torch.tensor([3, 1]))):
        assert isinstance(part, kind)
        assert values(part.place(CPU)[:]) == [expected[3], expected[1]]
