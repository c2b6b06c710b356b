"""Which layers a round concerns, under any strategy: the run's schedule, what clients hold already, and calibration.

A client that trains one stage of its encoder needs the stages before it, which no client changes any more. It receives
them once and keeps them: LW-FedSSL's Table 2 (Tun et al., arXiv 2401.11647) follows from what a client lacks, and so
does what one that joins late or missed a stage has to receive (end of Section 5.2). With calibration the server changes
all stages in every round, so that they travel down every time.
"""

from collections.abc import Iterable
from typing import Any, Protocol

from fedssl.layers import Layers
from fedssl.schedule.phases import Phase
from fedssl.schedule.stages import Stages


class Calibration(Protocol):
    """Training on the server itself, on auxiliary pictures; ``at`` is "start" or "end" of every round."""

    at: str

    def __call__(self, round: int, layers: Layers) -> Layers: ...


class Staging:
    """What a strategy does beside aggregating.

    Parameters
    ----------
    stages : Stages, optional
        None: all layers are trained in every round.
    calibration : Calibration, optional
    """

    def __init__(self, stages: Stages | None = None, calibration: Calibration | None = None) -> None:
        self._stages, self._calibration = stages, calibration
        self._took_part: dict[int, int] = {}  # the last round in which a client's update was used

    @property
    def hold(self) -> bool:
        """Whether what clients receive of frozen stages stays valid."""
        return self._stages is not None and self._calibration is None

    def begin(self, round: int, layers: Layers) -> Layers:
        """The global layers that clients start from."""
        if self._stages is not None:
            layers = self._stages.begin(round, layers)
        if self._calibration is not None and self._calibration.at == "start":
            layers = self._calibration(round, layers)
        return layers

    def end(self, round: int, layers: Layers, *, used: Iterable[int], dropped: Iterable[int]) -> Layers:
        """The global layers after the round; clients whose update was dropped hold nobody knows what."""
        self._took_part.update(dict.fromkeys(used, round))
        for client in dropped:
            self._took_part.pop(client, None)
        if self._calibration is not None and self._calibration.at == "end":
            layers = self._calibration(round, layers)
        return layers

    def divide(self, round: int, layers: Layers) -> tuple[Phase | None, tuple[str, ...], tuple[str, ...]]:
        """The stage, and the names of the layers that clients train and of those that they only use."""
        if self._stages is None:
            return None, tuple(layers), ()
        trained, frozen = self._stages.trained(round, layers), self._stages.frozen(round, layers)
        return self._stages.at(round), tuple(trained), tuple(frozen)

    def lacks(self, client: int, frozen: Iterable[str]) -> tuple[str, ...]:
        """Those of the frozen layers that the client does not have from a round in which they were frozen already."""
        last = self._took_part.get(client)
        if self._stages is None or not self.hold or last is None:
            return tuple(frozen)
        held = set(self._stages.frozen(last, frozen))
        return tuple(name for name in frozen if name not in held)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"took_part": dict(self._took_part)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._took_part = dict(state["took_part"])
