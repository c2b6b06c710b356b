"""Averages of the global model over rounds, which are evaluated and exported; training goes on with the model itself.

`EMA` is an exponential moving average, as of the teacher of BYOL, but on the server. `LastModels` is the mean of the
last models: FedExP (arXiv 2301.09604, Section 5) evaluates that of two, and stochastic weight averaging (Izmailov et
al., UAI 2018, arXiv 1803.05407) with federated SAM that of more. Transcribed from the papers, unverified against their
code. Both average running statistics like weights, and take counters from the newest model. An average starts again
with each phase of a schedule, because the model then has other layers.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedssl.arrays import Layers
from fedssl.config.constraints import check_arguments
from fedssl.schedule.phases import phase_at
from strategies.mods.base import Mod, ModState
from strategies.run_context import RunContext
from strategies.types import EVALUATED, GlobalModel


class ModelAverage(Mod):
    """Average of a global model over rounds. ``is_active`` is whether there is one."""

    is_active = True
    _context: RunContext

    @classmethod
    def make(cls, context: RunContext) -> "ModelAverage | None":
        average: ModelAverage = context.settings.algorithm.model_average.instantiate()
        average._context = context
        return average if average.is_active else None

    def end(self, model: GlobalModel, round: int) -> GlobalModel:
        context, key = self._context, type(self).__name__
        trained = context.stages.trained(phase_at(context.phases, round), model.layers)
        layers = {name: model.layers[name] for name in trained if model.layers[name].dtype.kind == "f"}
        state = model.mod_states.get(key, {})
        state = self.step(state if state.get(EVALUATED, {}).keys() == layers.keys() else {}, layers)
        return replace(model, mod_states={**model.mod_states, key: state})

    def step(self, state: ModState, layers: Layers) -> ModState:
        """Return the state after a round with new layers; empty before the first. It has the average in `EVALUATED`."""
        raise NotImplementedError


class NoAverage(ModelAverage):
    """No average: the model is evaluated."""

    is_active = False


class EMA(ModelAverage):
    r"""Exponential moving average of the global model.

    $$
    a \leftarrow \gamma a + (1 - \gamma) w
    $$

    with w the global weights after the round, $\gamma$ the ``decay`` in [0, 1), of which 0 is w, and a = w after the
    first round.
    """

    def __init__(self, *, decay: float = 0.9) -> None:
        check_arguments("model_average", decay=decay)
        self.decay = decay

    def step(self, state: ModState, layers: Layers) -> ModState:
        before = state.get(EVALUATED, layers)
        return {
            EVALUATED: {
                name: weighted_mean([before[name], w], [self.decay, 1 - self.decay]) for name, w in layers.items()
            }
        }


class LastModels(ModelAverage):
    r"""Mean of the global models of the last rounds.

    $$
    a = \frac{1}{m} \sum_{i=0}^{m-1} w^{(t-i)} \qquad m = \min(k, t)
    $$

    with $w^{(t)}$ the global weights after round t, and k the ``rounds``, of which 1 is w. The server holds k models.
    """

    def __init__(self, *, rounds: int = 5) -> None:
        check_arguments("model_average", rounds=rounds)
        self.rounds = rounds

    def step(self, state: ModState, layers: Layers) -> ModState:
        models = [layers, *(state[str(age)] for age in range(self.rounds) if str(age) in state)][: self.rounds]
        shares = [1 / len(models)] * len(models)
        mean = {name: weighted_mean([model[name] for model in models], shares) for name in layers}
        return {EVALUATED: mean} | {str(age): model for age, model in enumerate(models)}


def weighted_mean(arrays: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Return a weighted sum of arrays, computed in float64, in the dtype of the first."""
    total = sum(weight * array.astype(np.float64) for weight, array in zip(weights, arrays, strict=True))
    return np.asarray(total).astype(arrays[0].dtype)
