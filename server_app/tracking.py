"""A run's tracker, which must not be what ends the run: the first failure is told, and there is no second one."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedssl.config.compose import flatten
from fedssl.config.settings import RecordingSettings
from fedssl.untrusted import sanitize
from server_app.trackers.base import TrackedRun, Tracker, flatten_scalars, scalars_of

log = logging.getLogger("fedssl")


class SafeTracker:
    """Tells the tracker of a run what it is to know, until it fails.

    Parameters
    ----------
    settings : RecordingSettings

    Raises
    ------
    InputError
        The tracker cannot work here, e.g. its package is not installed.
    """

    def __init__(self, settings: RecordingSettings) -> None:
        self._tracker: Tracker = settings.tracker.make()
        self._works = False  # before the run begins there is nothing to tell

    def begin(self, settings: RecordingSettings, *, done: int) -> None:
        """Tell all settings; ``done`` are the rounds that a resumed run has done."""
        assert settings.folder is not None
        config = OmegaConf.create(settings.resolved_yaml)
        assert isinstance(config, DictConfig)
        self._works = True
        run = TrackedRun(folder=settings.folder, run_id=settings.run_id, done=done, settings=dict(flatten(config)))
        self._call(partial(self._tracker.begin, run))

    def round(self, line: Mapping[str, Any]) -> None:
        """Tell the numbers in a line of ``metrics.jsonl``."""
        self._call(partial(self._tracker.round, line["round"], scalars_of(line)))

    def end(self, summary: Mapping[str, Any]) -> None:
        """Tell the results in a summary, and how the run ended."""
        final = flatten_scalars(summary.get("final", {}), "final/")
        self._call(partial(self._tracker.end, summary["status"], round=summary["rounds"], final=final))
        self._works = False

    def _call(self, tell: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            tell()
        except Exception as error:  # a tracker may fail in any way: a full disk, a server that is gone
            self._works = False
            reason = " ".join(sanitize(f"{type(error).__name__}: {error}").split())[:300]
            log.warning("the tracker fails and is told no more of this run, whose folder has all numbers: %s", reason)
