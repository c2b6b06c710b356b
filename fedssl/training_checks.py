"""Rules of local training: views that a method, its encoder and a regularizer accept, and the loss of a step."""

from typing import Any

import torch
from torch import Tensor

from fedssl.augmentation import Augmentation
from fedssl.augmentation.recipe import ViewRecipe
from fedssl.encoders.base import Encoder
from fedssl.encoders.tokens import TokenEncoder
from fedssl.errors import InputError, reason_of
from fedssl.methods.base import SSLMethod
from fedssl.regularizers.base import Regularizer
from fedssl.views import GLOBAL, describe_views


def check_regularizer(
    regularizer: Regularizer, method: SSLMethod, augment: Augmentation, *, term: Regularizer | None = None
) -> None:
    """Reject a regularizer of outputs that the method does not compute; ``term`` is the strategy's part of it."""
    resolved, name = ((one.resolve_part(method), one) for one in regularizer.terms), type(method).__name__
    parts = {part: one for part, one in resolved if part is not None}
    if len(parts) > 1:
        needs = " and ".join(f"{_described(one, term)} needs that of the {part}" for part, one in parts.items())
        raise InputError(f"a step has the output of one part, but {needs}; set regularizer=none")
    whole = [recipe for recipe in augment.recipes if recipe.role == GLOBAL]
    for part, one in parts.items():
        is_of_strategy = term is not None and one in term.terms
        if part not in (child for child, _ in method.named_children()):
            other = "strategy" if is_of_strategy else "regularizer"
            raise InputError(
                f"{_described(one, term)} needs a {part}, which {name} does not have; set another {other} or method"
            )
        others = "strategy=fedavg" if is_of_strategy else "regularizer=none or regularizer=prox"
        needed = f"{_described(one, term)} needs the {part}'s output for {one.num_views} whole views"
        max_global = method.accepted_views.max_global
        if part not in method.regularized_parts or (max_global is not None and max_global < one.num_views):
            raise InputError(f"{needed}, which {name} does not compute; set {others}, or another method")
        if len(whole) < one.num_views:
            count = whole[-1].count + one.num_views - len(whole)
            raise InputError(
                f"{needed}, but augmentation.views has {describe_views(*_kinds(augment))}; "
                f"set {whole[-1].name}.count={count}, or {others}"
            )
    for one in regularizer.terms:
        if one.equal_global_sizes:
            _check_global_sizes(augment, user=_described(one, term), num_views=one.num_views)


def _described(one: Regularizer, term: Regularizer | None) -> str:
    return "the strategy's term" if term is not None and one in term.terms else type(one).__name__


def _kinds(augment: Augmentation) -> tuple[list[str], list[str | None]]:
    """Return the roles of all views, and the kinds of their masks."""
    return [one.role for one in augment.recipes], [one.mask.kind if one.mask else None for one in augment.recipes]


def check_views(augment: Augmentation, method: SSLMethod) -> None:
    """Reject an augmentation whose views the method does not accept, or whose sizes the encoder does not accept."""
    kinds, accepted = _kinds(augment), method.accepted_views
    if not accepted.accept(*kinds):
        raise InputError(
            f"{type(method).__name__} trains on {accepted} but augmentation.views has {describe_views(*kinds)}; "
            f"set augmentation={accepted.augmentation}"
        )
    if method.equal_global_sizes:
        _check_global_sizes(augment, user=type(method).__name__)
    for recipe in augment.recipes:
        patch = method.encoder.patch_size if isinstance(method.encoder, TokenEncoder) else None
        if recipe.mask is not None and recipe.mask.patch != patch:
            raise InputError(
                f"{recipe.name}.mask.patch={recipe.mask.patch} but encoder.patch={patch}; leave "
                "augmentation.views.*.mask.patch at its default"
            )
    for recipe, size in zip(augment.recipes, augment.sizes, strict=True):
        _check_view_size(method.encoder, recipe, (augment.channels, size, size))


def _check_global_sizes(augment: Augmentation, *, user: str, num_views: int | None = None) -> None:
    """Reject different sizes of the first ``num_views`` global views, or of all, which the ``user`` concatenates."""
    pairs = zip(augment.recipes, augment.sizes, strict=True)
    whole = [(size, recipe.name, recipe.size) for recipe, size in pairs if recipe.role == GLOBAL][:num_views]
    pixels, name, fraction = max(whole, key=lambda view: view[0])
    smaller = {other: size for size, other, _ in whole if size < pixels}
    if smaller:
        other, size = next(iter(smaller.items()))
        raise InputError(
            f"{user} concatenates whole views, but {name} has views of {pixels} pixels and {other} of {size}; "
            f"set {' '.join(f'{each}.size={fraction:g}' for each in smaller)}"
        )


def _check_view_size(encoder: Encoder, recipe: ViewRecipe, shape: tuple[int, int, int]) -> None:
    channels, size, _ = shape
    largest, step = encoder.image_size, encoder.view_step
    if recipe.size == 1 or largest is None or size >= largest:
        encoder.check_view_shape(shape)
        return
    encoder.check_image_shape((channels, largest, largest))
    try:
        encoder.check_view_shape(shape)
    except InputError as error:
        allowed = f"only {largest}" if step is None else f"only {largest} and smaller multiples of {step}"
        raise InputError(
            f"{recipe.name} has views of {size} pixels, but {encoder.label} takes {allowed}; "
            f"set {recipe.name}.size=1, or another encoder"
        ) from error


@torch.no_grad()
def check_encoder(encoder: Encoder, shape: tuple[int, int, int]) -> None:
    """Raise an `InputError` unless an encoder accepts images of ``shape``, and a user's one returns `feature_dim`."""
    encoder.check_image_shape(shape)
    if type(encoder).__module__.partition(".")[0] == "fedssl":
        return
    name, mode = type(encoder).__name__, encoder.training
    try:
        generators = torch.random.fork_rng(devices=[])
        images = torch.zeros(2, *shape, device=next(encoder.parameters(), torch.zeros(())).device)
        with generators:
            found = tuple(encoder.eval()(images).shape)
    except Exception as error:  # a user's code can raise any
        raise InputError(f"{name} fails on images of shape {shape}: {reason_of(error)}; correct its stages") from error
    finally:
        encoder.train(mode)
    length = encoder.feature_dim
    if found != (2, length):
        raise InputError(f"{name} returns the shape {found} for 2 images; return (2, feature_dim={length})")


def check_loss(loss: Any, *owners: object, has_gradient: bool = True) -> None:
    """Raise an `InputError` unless the loss of a step is a scalar, with a gradient if it must have one.

    ``owners`` have computed it: a method, or the terms of a regularizer.
    """
    is_scalar = isinstance(loss, Tensor) and loss.ndim == 0
    if is_scalar and (loss.requires_grad or not has_gradient):
        return
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    found += " without a gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""
    names = " and ".join(type(owner).__name__ for owner in owners)
    raise InputError(f"the loss of {names} is {found}; return a scalar tensor with a gradient")
