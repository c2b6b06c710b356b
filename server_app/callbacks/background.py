"""Callbacks that record a round while the next one runs, if that changes no number and cores are free."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from fedssl.machine.process import available_cores
from server_app.build import RunComponents
from server_app.callbacks.base import Callback, Callbacks, RoundEnd, RunEnd

log = logging.getLogger("fedssl")


def can_evaluate_in_background(components: RunComponents, client_cores: int | None) -> bool:
    """Return whether rounds may be evaluated and recorded while the next one runs.

    ``client_cores`` is the number of cores of this machine that clients occupy; None if unknown.
    """
    settings = components.settings
    if components.client_data is None:  # edge clients run elsewhere
        client_cores = 0
    return (
        client_cores is not None
        and available_cores() - client_cores >= settings.machine.threads
        # Early stopping decides about the next round by the evaluation.
        and settings.evaluation.early_stopping.monitor is None
        # Other training or sampling here would share the random generator and the GPU's memory.
        and not components.evaluator.trains_network
        and not any(mod.trains for mod in components.federation.mods)
    )


class InBackground(Callbacks):
    """Callbacks that record one round after the other, those for which ``due`` returns True in a thread.

    ``threads`` is the number of torch's threads there.
    """

    def __init__(self, callbacks: Sequence[Callback], *, due: Callable[[int], bool], threads: int) -> None:
        super().__init__(callbacks)
        self._due, self._threads = due, threads
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evaluation")
        self._pending: Future[None] | None = None

    def wait(self) -> None:
        """Wait until all rounds are recorded; raises the error of the last one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def on_round_end(self, end: RoundEnd) -> None:
        """Record a round, now or while the next one runs."""
        self.wait()
        if self._due(end.state.round):
            self._pending = self._executor.submit(self._record, end)
        else:
            super().on_round_end(end)

    def on_run_end(self, end: RunEnd) -> None:
        """Wait for the last round. After an error of another one its own is not raised."""
        with end.collect_error():
            if end.error is not None and self._pending is not None and not self._pending.done():
                log.info("the last round is still being evaluated")
            self._executor.shutdown()
            if end.error is None:
                self.wait()
        super().on_run_end(end)

    def _record(self, end: RoundEnd) -> None:
        torch.set_num_threads(self._threads)
        super().on_round_end(end)
