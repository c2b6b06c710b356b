"""Weights & Biases, offline by default, in ``wandb/`` of the working directory or of ``WANDB_DIR``.

It does not write to the run folder, because it creates links, which are refused there.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedssl.errors import InputError
from server_app.trackers.base import TrackedRun, missing_package

if TYPE_CHECKING:
    import wandb

MODES = ("offline", "online")


class WandB:
    """A run with fedssl's run id, so that a resumed run continues it. ``run`` None is the name of the run folder."""

    def __init__(self, *, project: str, run: str | None, mode: str) -> None:
        if mode not in MODES:
            raise InputError(f"tracker.mode={mode} is not valid; choose one of {', '.join(MODES)}")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no telemetry
        try:
            import wandb
        except ImportError as error:
            raise missing_package("wandb", "wandb") from error
        self._wandb, self._project, self._name, self._mode = wandb, project, run, mode

    def begin(self, run: TrackedRun) -> None:
        """Start or continue the run. Offline, each part is a folder, and ``wandb sync`` joins them by the id."""
        settings = self._wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
        )
        self._run: wandb.Run = self._wandb.init(
            project=self._project,
            name=self._name or run.folder.name,
            id=run.run_id,
            resume="allow" if self._mode == "online" else None,
            mode="online" if self._mode == "online" else "offline",
            config={**run.settings},
            allow_val_change=True,
            reinit="create_new",  # an unfinished run of a sweep is a separate run
            settings=settings,
        )

    def round(self, round: int, numbers: Mapping[str, float]) -> None:
        """Log the metrics of a round as a step: W&B keeps one row for each, and ignores steps that are repeated."""
        self._run.log({"round": round, **numbers}, step=round, commit=True)

    def end(self, status: str, *, round: int, final: Mapping[str, float]) -> None:
        self._run.summary.update({**final, "status": status, "rounds": round})
        self._run.finish(exit_code=0 if status in ("finished", "paused") else 1)
