"""A batch of views: random views of the same images, on which a method trains.

Multi-crop methods distinguish *global* views, which show most of an image, and smaller *local* views (SwAV, arXiv
2006.09882; DINO, arXiv 2104.14294). Masked methods hide patches of a view (MAE, arXiv 2111.06377).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_leaves, tree_map_only

GLOBAL, LOCAL = "global", "local"  # roles of a view


@dataclass(frozen=True)
class Mask:
    """Patches of a view that are hidden from the encoder, and patches to predict; patches are numbered row by row."""

    hidden: Tensor  # whether a patch is hidden, bool, ``(batch, patches)``
    # Indices of the patches that the encoder processes, ascending, int64, ``(batch, n)``. None if their number differs
    # between images.
    visible: Tensor | None = None
    # Indices of the patches to predict, in blocks, ascending, int64, ``(batch, blocks, m)``. None as above.
    targets: Tensor | None = None
    # Numbers of the hidden patches, counted over the whole batch, int64, ``(n,)``, see
    # `fedssl.augmentation.patch_masks.padded_numbers`. None for ``multi_block``.
    hidden_numbers: Tensor | None = None

    @property
    def indices(self) -> tuple[Tensor, Tensor]:
        """Indices of visible and target patches, of a mask that has them."""
        assert self.visible is not None
        assert self.targets is not None
        return self.visible, self.targets


@dataclass(frozen=True)
class View:
    """One random view of each image of a batch."""

    images: Tensor  # normalized, ``(batch, channels, size, size)``, or the output of the frozen stages of an encoder
    role: str = GLOBAL  # "global" or "local": whether the view shows most of an image or a small part of it
    mask: Mask | None = None  # hidden patches; None if no patch is hidden


@dataclass(frozen=True)
class Views:
    """Views of the same images: global ones first, then local ones."""

    views: tuple[View, ...]  # at least one
    labels: Tensor | None = None  # classes of the images, int64, ``(batch,)``, for methods that use them
    # Targets of the images, such as a teacher's features, ``(batch, dim)``, for methods that define
    # `fedssl.methods.base.SSLMethod.targets`.
    targets: Tensor | None = None

    @classmethod
    def of(cls, *images: Tensor, labels: Tensor | None = None) -> "Views":
        """Build global views without masks from their images."""
        return cls(tuple(map(View, images)), labels)

    @property
    def images(self) -> list[Tensor]:
        """Images of all views."""
        return [view.images for view in self.views]

    @property
    def global_images(self) -> list[Tensor]:
        """Images of the global views."""
        return [view.images for view in self.views if view.role == GLOBAL]

    @property
    def local_images(self) -> list[Tensor]:
        """Images of the local views."""
        return [view.images for view in self.views if view.role == LOCAL]

    @property
    def num_images(self) -> int:
        """Number of images of the batch."""
        return len(self.views[0].images)

    def with_images(self, images: Sequence[Tensor]) -> "Views":
        """Return the views with other images, such as the output of frozen stages."""
        pairs = zip(self.views, images, strict=True)
        return replace(self, views=tuple(replace(view, images=tensor) for view, tensor in pairs))

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the order of `with_tensors`."""
        return [leaf for leaf in tree_leaves(self) if isinstance(leaf, Tensor)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Views":
        """Return the views with other tensors, of the same number and order as in `tensors`."""
        left = iter(tensors)
        views: Views = tree_map_only(Tensor, lambda _: next(left), self)
        return views

    def __getitem__(self, index: int) -> View:
        return self.views[index]

    def __len__(self) -> int:
        return len(self.views)

    def __iter__(self) -> Iterator[View]:
        return iter(self.views)


for tree in (Mask, View, Views):  # for `tree_leaves` and the like
    register_dataclass(tree)


def by_size(images: Sequence[Tensor]) -> list[Tensor]:
    """Concatenate consecutive views of equal size along the batch, so that each size needs one forward pass.

    ``images`` are ``(batch, channels, size, size)``, or the output of frozen stages. The order of views is kept.
    """
    return [torch.cat(list(group)) for _, group in groupby(images, key=lambda view: view.shape[1:])]


@dataclass(frozen=True, kw_only=True)
class AcceptedViews:
    """Views that a method accepts."""

    min_global: int = 2  # smallest number of global views
    max_global: int | None = 2  # largest number of global views; None is any number
    local: bool = False  # whether the method accepts local views, in any number
    masks: tuple[str, ...] = ()  # accepted kinds of `fedssl.augmentation.patch_masks` of the global views; empty: none
    augmentation: str = "simclr"  # a choice of ``augmentation`` with such views, for error messages

    def accept(self, roles: Sequence[str], masks: Sequence[str | None]) -> bool:
        """Return whether views with these roles and kinds of masks are accepted."""
        count = sum(role == GLOBAL for role in roles)
        enough = self.min_global <= count and (self.max_global is None or count <= self.max_global)
        masked = all(
            mask in self.masks if self.masks and role == GLOBAL else mask is None
            for role, mask in zip(roles, masks, strict=True)
        )
        return enough and masked and (self.local or LOCAL not in roles)

    def __str__(self) -> str:
        number = f"{self.min_global}" if self.min_global == self.max_global else f"at least {self.min_global}"
        kinds = " with a mask of kind " + " or ".join(self.masks) if self.masks else ""
        plural = "" if number == "1" else "s"
        return f"{number} global view{plural}{kinds}" + (" and any number of local views" if self.local else "")


def describe_views(roles: Sequence[str], masks: Sequence[str | None]) -> str:
    """Return a short description of views for error messages, e.g. "2 global views and 6 local views"."""
    kinds = list(zip(roles, masks, strict=True))
    return " and ".join(
        f"{kinds.count(kind)} {kind[0]} view{'' if kinds.count(kind) == 1 else 's'}"
        + (f" with a mask of kind {kind[1]}" if kind[1] else "")
        for kind in dict.fromkeys(kinds)
    )
