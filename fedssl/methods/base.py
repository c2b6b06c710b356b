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
    ``target_encoder``, ``target_projector``. Parts named in ``local_parts`` stay with the client between rounds (they are
    its state). An optimizer gets the parameters that require a gradient, and no others.

    A method may have a server side. Parts named in ``uploaded_parts`` go up to it and are not averaged: `aggregate_parts` makes
    of those of all clients what ``broadcast_parts`` names, which comes down to the clients and does not go up. All other parts
    travel both ways and are what strategies aggregate.

    Attributes
    ----------
    encoder : Encoder
        Maps images ``(batch, channels, size, size)`` to representations h ``(batch, feature_dim)``.
    local_parts : tuple of str
        Parts that never leave the client.
    uploaded_parts, broadcast_parts : tuple of str
        Parts that every client sends to the method's server side, and that this gives to the clients. Names, shapes
        and dtypes of their layers are those of the method as it is built.
    static_parts : tuple of str
        Those of ``broadcast_parts`` that `aggregate_parts` leaves as they are: a client receives them once, and holds them.
    frozen : int
        Stages of the encoder that are not trained at present, see `fedssl.schedule.stages`.
    inactive_names : frozenset of str
        Layers that are out of use at present.
    target_mode : {"keep", "copy", "average"} or None
        What target networks are at the start of a round, see `fedssl.methods.momentum.EMATargetMethod`; None: there are
        none.
    min_batch_size : int
        Fewest images that a step can learn anything from. 2 where nothing else is said: an image alone has no other
        to be told apart from, and its batch normalization is 0 whatever the image.
    uses_labels : bool
        Whether `loss` takes the labels of the images, int64, ``(batch,)``, as a third argument.
    cuda_graph_safe : bool
        Whether `loss` and `on_step_end` do the same to other numbers in every step of as many images, in memory that
        stays where it is from round to round, so that a GPU can record them.
    """

    encoder: Encoder
    local_parts: tuple[str, ...] = ()
    uploaded_parts: tuple[str, ...] = ()
    broadcast_parts: tuple[str, ...] = ()
    static_parts: tuple[str, ...] = ()
    frozen: int = 0
    inactive_names: frozenset[str] = frozenset()
    target_mode: str | None = None
    min_batch_size: int = 2
    uses_labels: bool = False
    cuda_graph_safe: bool = True

    @cached_property
    def named_tensors(self) -> dict[str, Tensor]:
        """The live parameters and buffers by name; ``state_dict`` would look them up anew at every call."""
        return dict(self.state_dict(keep_vars=True))

    @cached_property
    def trainable(self) -> list[str]:
        """Names of the parameters that the method trains if no stage of its encoder is frozen."""
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SSLMethod":
        self.__dict__.pop("named_tensors", None)  # torch replaces buffers when it moves a module
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

    def on_step_end(self) -> None:
        """Follow-up of one optimizer step, e.g. the moving average of a target network."""

    def end_round(self) -> None:
        """Follow-up of local training, before it is read what stays with the client and what travels."""

    def classify(self, h: Tensor) -> Tensor | None:
        """Logits ``(batch, num_classes)`` of representations by a classifier of the method's own; None without one.

        Only methods that use labels are asked.
        """
        return None

    def aggregate_parts(self, uploaded: Sequence[Layers], broadcast: Layers) -> Layers:
        """The server side: what clients are given next.

        Parameters
        ----------
        uploaded : sequence of Layers
            What each client of the round sent, in order of partition ids; at least one.
        broadcast : Layers
            What the clients had been given. It begins with the buffers as the method is built.

        Returns
        -------
        Layers
            With the names, shapes and dtypes of ``broadcast``.
        """
        return broadcast
