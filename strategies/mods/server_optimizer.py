"""Server optimizers: steps on the aggregated layers of any rule.

The difference between the old and the aggregated global weights is the gradient (Reddi et al., "Adaptive Federated
Optimization", arXiv 2003.00295). FedAvgM, FedAdagrad, FedAdam and FedYogi compute the same as Flower's strategies of
these names, but on weights only. Flower's also update running statistics, whose variance can become negative, and make
counters fractions. Here these are the aggregated values.
"""

import numpy as np

from fedssl.arrays import Layers, is_weight
from fedssl.config.constraints import check_arguments
from strategies.mods.base import Mod, ModState
from strategies.round_start import StartingModel
from strategies.run_context import RunContext

Moments = dict[str, Layers]  # by the name of the moment, an array for each layer


class ServerOptimizer(Mod):
    """Step on the aggregated layers, with moments of previous steps. Moments are initially zero.

    Attributes
    ----------
    names : tuple of str
        Names of the moments.
    is_active : bool
        Whether there is a step.
    """

    names: tuple[str, ...] = ()
    is_active = True

    def __init__(self, *, lr: float) -> None:
        check_arguments("server_optimizer", lr=lr)
        self.lr = lr

    @classmethod
    def make(cls, context: RunContext) -> "ServerOptimizer | None":
        optimizer: ServerOptimizer = context.settings.algorithm.server_optimizer.instantiate()
        return optimizer if optimizer.is_active else None

    def finish(
        self, layers: Layers, start: StartingModel, state: ModState, *, used: int, round: int
    ) -> tuple[Layers, ModState]:
        moments, new = self.step(state, start.model.num_updates + 1, start.expected_upload.layers, layers)
        return new, moments

    def step(self, moments: Moments, step: int, old: Layers, aggregated: Layers) -> tuple[Moments, Layers]:
        """Return the new moments and the new layers, with names, order, shapes and dtypes of ``aggregated``."""
        new_moments = {moment: dict(moments.get(moment, {})) for moment in self.names}
        layers = dict(aggregated)
        for name, array in aggregated.items():
            if is_weight(name, array):
                before = [new_moments[moment].get(name, np.zeros_like(array)) for moment in self.names]
                after, layers[name] = self._step_array(step, old[name], array, before)
                for moment, value in zip(self.names, after, strict=True):
                    new_moments[moment][name] = np.asarray(value)  # NumPy returns scalars for arrays without axes
        return new_moments, layers

    def _step_array(
        self, step: int, old: np.ndarray, aggregated: np.ndarray, moments: list[np.ndarray]
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the new moments, in the order of ``names``, and the new weights."""
        raise NotImplementedError


class NoServerOptimizer(ServerOptimizer):
    """No step: the aggregated layers are the new ones."""

    is_active = False

    def __init__(self) -> None:
        super().__init__(lr=1.0)


class FedAvgM(ServerOptimizer):
    r"""Momentum on the server (Hsu et al., arXiv 1909.06335).

    $$
    v \leftarrow \beta v + (w_g - \bar{w}) \qquad w = w_g - \eta v
    $$

    with $w_g$ the global weights that clients started from, $\bar{w}$ the aggregated ones, $\beta$ the ``momentum`` and
    $\eta$ the ``lr``.
    """

    names = ("velocity",)

    def __init__(self, *, lr: float = 1.0, momentum: float = 0.9) -> None:
        super().__init__(lr=lr)
        check_arguments("server_optimizer", momentum=momentum)
        self.momentum = momentum

    def _step_array(
        self, step: int, old: np.ndarray, aggregated: np.ndarray, moments: list[np.ndarray]
    ) -> tuple[list[np.ndarray], np.ndarray]:
        kind = old.dtype.type
        velocity = kind(self.momentum) * moments[0] + (old - aggregated)
        return [velocity], np.asarray(old - kind(self.lr) * velocity)


class FedAdam(ServerOptimizer):
    r"""Adam on the server (Algorithm 2 of arXiv 2003.00295, with the bias correction of Flower's FedAdam).

    $$
    m \leftarrow \beta_1 m + (1 - \beta_1) \Delta \qquad v \leftarrow \beta_2 v + (1 - \beta_2) \Delta^2 \qquad
    w = w_g + \eta \, \frac{\sqrt{1 - \beta_2^{r+1}}}{1 - \beta_1^{r+1}} \, \frac{m}{\sqrt{v} + \tau}
    $$

    with $w_g$ the global weights that clients started from, $\Delta$ the aggregated ones minus these, and r the step of
    the model.
    """

    names = ("m", "v")

    def __init__(self, *, lr: float = 0.1, beta_1: float = 0.9, beta_2: float = 0.99, tau: float = 1e-3) -> None:
        super().__init__(lr=lr)
        check_arguments("server_optimizer", tau=tau, beta_1=beta_1, beta_2=beta_2)
        self.beta_1, self.beta_2, self.tau = beta_1, beta_2, tau

    def _step_array(
        self, step: int, old: np.ndarray, aggregated: np.ndarray, moments: list[np.ndarray]
    ) -> tuple[list[np.ndarray], np.ndarray]:
        kind = old.dtype.type
        m, v = moments
        delta = aggregated - old
        m = m + kind(1 - self.beta_1) * (delta - m)
        v = self._second_moment(v, delta * delta)
        return [m, v], np.asarray(old + kind(self._rate(step)) * m / (np.sqrt(v) + kind(self.tau)))

    def _second_moment(self, v: np.ndarray, square: np.ndarray) -> np.ndarray:
        return np.asarray(v + v.dtype.type(1 - self.beta_2) * (square - v))

    def _rate(self, step: int) -> float:
        return float(self.lr * np.sqrt(1 - self.beta_2 ** (step + 1)) / (1 - self.beta_1 ** (step + 1)))


class FedYogi(FedAdam):
    r"""Yogi on the server: `FedAdam` with another second moment, and without a bias correction.

    $$
    v \leftarrow v - (1 - \beta_2) \, \Delta^2 \operatorname{sign}(v - \Delta^2) \qquad
    w = w_g + \eta \, \frac{m}{\sqrt{v} + \tau}
    $$
    """

    def __init__(self, *, lr: float = 0.01, beta_1: float = 0.9, beta_2: float = 0.99, tau: float = 1e-3) -> None:
        super().__init__(lr=lr, beta_1=beta_1, beta_2=beta_2, tau=tau)

    def _second_moment(self, v: np.ndarray, square: np.ndarray) -> np.ndarray:
        return np.asarray(v - v.dtype.type(1 - self.beta_2) * square * np.sign(v - square))

    def _rate(self, step: int) -> float:
        return self.lr


class FedAdagrad(FedAdam):
    r"""Adagrad on the server: `FedAdam` with a growing second moment, and without a first moment or bias correction.

    $$
    v \leftarrow v + \Delta^2 \qquad w = w_g + \eta \, \frac{\Delta}{\sqrt{v} + \tau}
    $$
    """

    def __init__(self, *, lr: float = 0.1, beta_1: float = 0.0, tau: float = 1e-3) -> None:
        super().__init__(lr=lr, beta_1=beta_1, tau=tau)

    def _second_moment(self, v: np.ndarray, square: np.ndarray) -> np.ndarray:
        return np.asarray(v + square)

    def _rate(self, step: int) -> float:
        return self.lr
