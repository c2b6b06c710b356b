"""What a self-supervised method is: an encoder, heads, and a loss on two views of the same images."""

from collections.abc import Callable, Sequence
from functools import cached_property

from torch import Tensor, nn

from fedssl.arrays import Layers
from fedssl.encoders.base import Encoder

TEACHER = "teacher"  # the constant part whose weights the server reads from the file of the setting `teacher`


class SSLMethod(nn.Module):
    """An encoder with the heads and the loss that train it.

    The first component of a ``state_dict`` name tells the part: ``encoder``, ``projector``, ``predictor``,
    ``target_encoder``, ``target_projector``. Parts named in ``kept`` stay with the client between rounds (they are
    its state). An optimiser gets the parameters that require a gradient, and no others.

    A method may have a half on the server. Parts named in ``gathered`` go up to it and are not averaged: `gather` makes
    of those of all clients what ``shared`` names, which comes down to the clients and does not go up. All other parts
    travel both ways and are what strategies aggregate.

    Attributes
    ----------
    encoder : Encoder
        Maps images ``(batch, channels, size, size)`` to representations h ``(batch, feature_dim)``.
    kept : tuple of str
        Parts that never leave the client.
    gathered, shared : tuple of str
        Parts that every client sends to the method's server half, and that this gives to the clients. Names, shapes
        and dtypes of their layers are those of the method as it is built.
    constant : tuple of str
        Those of ``shared`` that `gather` leaves as they are: a client receives them once, and holds them.
    frozen : int
        Stages of the encoder that are not trained at present, see `fedssl.schedule.stages`.
    idle : frozenset of str
        Layers that are out of use at present.
    target : {"keep", "copy", "average"} or None
        What target networks are at the start of a round, see `fedssl.methods.momentum.FollowedMethod`; None: there are
        none.
    smallest_batch : int
        Fewest images that a step can learn anything from. 2 where nothing else is said: an image alone has no other
        to be told apart from, and its batch normalisation is 0 whatever the image.
    uses_labels : bool
        Whether `loss` takes the labels of the images, int64, ``(batch,)``, as a third argument.
    repeatable : bool
        Whether `loss` and `after_step` do the same to other numbers in every step of as many images, in memory that
        stays where it is from round to round, so that a GPU can record them.
    """

    encoder: Encoder
    kept: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()
    frozen: int = 0
    idle: frozenset[str] = frozenset()
    target: str | None = None
    smallest_batch: int = 2
    uses_labels: bool = False
    repeatable: bool = True

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The live parameters and buffers by name; ``state_dict`` would look them up anew at every call."""
        return dict(self.state_dict(keep_vars=True))

    @cached_property
    def trainable(self) -> list[str]:
        """Names of the parameters that the method trains if no stage of its encoder is frozen."""
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SSLMethod":
        self.__dict__.pop("tensors", None)  # torch replaces buffers when it moves a module
        super()._apply(fn, recurse)
        return self

    def loss(self, view1: Tensor, view2: Tensor) -> Tensor:
        """The training loss, a scalar, of two views of the same images.

        They are ``(batch, channels, size, size)``, or, while stages are frozen, what these make of such views.
        """
        raise NotImplementedError

    def inputs(self, view1: Tensor, view2: Tensor) -> tuple[Tensor, ...]:
        """All images that `loss` takes: the two views, and others that a method makes of them."""
        return view1, view2

    def start_round(self, *, first: bool) -> None:
        """Prepare for local training after the layers were loaded.

        ``first``: something of what the client keeps was missing, because it takes part for the first time or other
        stages are trained.
        """

    def after_step(self) -> None:
        """Follow-up of one optimiser step, e.g. the moving average of a target network."""

    def end_round(self) -> None:
        """Follow-up of local training, before it is read what stays with the client and what travels."""

    def classify(self, h: Tensor) -> Tensor | None:
        """Logits ``(batch, num_classes)`` of representations by a classifier of the method's own; None without one.

        Only methods that use labels are asked.
        """
        return None

    def gather(self, gathered: Sequence[Layers], shared: Layers) -> Layers:
        """The server half: what clients are given next.

        Parameters
        ----------
        gathered : sequence of Layers
            What each client of the round sent, in order of partition ids; at least one.
        shared : Layers
            What the clients had been given. It begins with the buffers as the method is built.

        Returns
        -------
        Layers
            With the names, shapes and dtypes of ``shared``.
        """
        return shared
