"""The interface of callbacks: what is recorded or watched while a run goes on.

`server_app.callbacks.order.make_callbacks` lists all of them. Every hook is called in this order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fedssl.arrays import Layers
from fedssl.evaluation.scores import Score
from fedssl.rules import Problem
from fedssl.schedule.phases import Phase
from server_app.collapse_monitor import CollapseReport
from server_app.evaluator import ResultsByModel
from server_app.updates import RoundResult
from strategies.types import ServerState

Observer = Callable[[int, Layers], None]


@dataclass(kw_only=True)
class RoundEnd:
    """A round that has ended. Callbacks add to its lines."""

    state: ServerState
    result: RoundResult
    phase: Phase
    seconds: float
    models: Mapping[str, Layers]  # by name; those of single clients are read whenever they are needed
    line: dict[str, Any] = field(default_factory=dict)  # of ``metrics.jsonl``
    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # of other files, by their names
    evaluation: Mapping[str, Score] = field(default_factory=dict)  # means over the models
    health: CollapseReport | None = None


@dataclass(kw_only=True)
class RunEnd:
    """The end of a run. ``error`` is the first one."""

    state: ServerState = field(default_factory=ServerState)  # after the last round
    is_paused: bool = False
    reason: str | None = None  # why the run ends before its last round
    error: BaseException | None = None
    # For ``summary.json``: the final comparison, the results of every model, and the means of personalized ones. The
    # first is None if the run has not finished.
    final: ResultsByModel | None = None
    models: ResultsByModel = field(default_factory=dict)
    personalized: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def status(self) -> str:
        if self.error is None:
            return "paused" if self.is_paused else "finished"
        return "interrupted" if isinstance(self.error, KeyboardInterrupt | SystemExit) else "failed"

    @contextmanager
    def collect_error(self) -> Iterator[None]:
        """Collect the error of the block, unless there is an earlier one."""
        try:
            yield
        except BaseException as error:
            self.error = self.error or error


class Callback:
    """A callback that does nothing. ``observes`` is whether `on_update` is called in the current round."""

    observes = False

    def on_run_start(self, state: ServerState) -> None:
        """Start. ``state`` is that of the last checkpoint of a resumed run."""

    def on_round_start(self, round: int) -> None:
        """Prepare a round."""

    def on_update(self, client: int, layers: Layers) -> None:
        """See the active layers of a client's update that is used."""

    def on_round_end(self, end: RoundEnd) -> None:
        """Record a round."""

    def stop_reason(self) -> Problem:
        """Return the reason to end the run before its next round; None: it continues."""
        return None

    def on_run_end(self, end: RunEnd) -> None:
        """Record the end of the run. Called also after an error, then even of an earlier callback."""


class Callbacks(Callback):
    """Callbacks whose hooks are called in this order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    def on_run_start(self, state: ServerState) -> None:
        for callback in self._callbacks:
            callback.on_run_start(state)

    def on_round_start(self, round: int) -> None:
        for callback in self._callbacks:
            callback.on_round_start(round)

    @property
    def observers(self) -> list[Observer]:
        return [callback.on_update for callback in self._callbacks if callback.observes]

    def on_round_end(self, end: RoundEnd) -> None:
        for callback in self._callbacks:
            callback.on_round_end(end)

    def stop_reason(self) -> Problem:
        reasons = (callback.stop_reason() for callback in self._callbacks)
        return next((reason for reason in reasons if reason is not None), None)

    def on_run_end(self, end: RunEnd) -> None:
        for callback in self._callbacks:
            with end.collect_error():
                callback.on_run_end(end)

    @contextmanager
    def running(self) -> Iterator[RunEnd]:
        """Yield the end of the run, which is recorded after the block. Raise its error."""
        end = RunEnd()
        with end.collect_error():
            yield end
        self.on_run_end(end)
        if end.error is not None:
            raise end.error
