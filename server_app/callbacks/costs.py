"""The cost of a client's training in a round."""

from collections.abc import Callable

from fedssl.step_cost import TrainingCostMeter
from server_app.callbacks.base import Callback, RoundEnd


class Costs(Callback):
    """Adds the cost to the line. ``wait`` returns when nothing else uses the GPU, whose memory is measured."""

    def __init__(self, meter: TrainingCostMeter, *, wait: Callable[[], None]) -> None:
        self._meter, self._wait = meter, wait

    def on_round_end(self, end: RoundEnd) -> None:
        self._wait()
        cost = self._meter(end.phase, [row.client for row in end.result.clients])
        if cost:
            end.line["cost"] = dict(cost)
