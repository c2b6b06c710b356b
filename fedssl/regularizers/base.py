"""What a regulariser is: a term added to the local loss of any method."""

from torch import Tensor

from fedssl.methods.base import SSLMethod


class Regularizer:
    """A term of the local loss; this one adds nothing."""

    def start(self, method: SSLMethod) -> None:
        """Prepare for one client's local training, which starts from the model as it is now."""

    def add_to(self, loss: Tensor, method: SSLMethod) -> Tensor:
        """The loss with the term added, a scalar."""
        return loss
