"""MLflow: a SQLite database in the run folder, or a tracking server."""

import os
import time
from collections.abc import Mapping

from server_app.trackers.base import TrackedRun, missing_package

RUN_ID = "fedssl.run_id"  # tag that identifies the run after a resume

_LONGEST = 6000  # maximum characters of a parameter's value
_AT_ONCE = 100  # parameters per request
_ENDED = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "paused": "SCHEDULED"}


class MLflow:
    """A run with fedssl's run id as a tag, so that a resumed run continues it.

    ``run`` None is the name of the run folder, and the tracking URI ``uri`` None is ``mlflow.db`` in the run folder.
    """

    def __init__(self, *, experiment: str, run: str | None, uri: str | None) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # no telemetry
        # An unreachable server must not delay a run. MLflow's default is 7 retries, some of them minutes apart.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        try:
            import mlflow.entities
            import mlflow.tracking
        except ImportError as error:
            raise missing_package("mlflow", "mlflow-skinny") from error
        self._entities, self._client_class = mlflow.entities, mlflow.tracking.MlflowClient
        self._experiment, self._name, self._uri = experiment, run, uri

    def begin(self, run: TrackedRun) -> None:
        """Create the run, or continue the one with the tag. Its parameters are unchanged."""
        self._client = self._client_class(tracking_uri=self._uri or f"sqlite:///{run.folder / 'mlflow.db'}")
        existing = self._client.get_experiment_by_name(self._experiment)
        experiment = existing.experiment_id if existing else self._client.create_experiment(self._experiment)
        known = self._client.search_runs([experiment], f"tags.`{RUN_ID}` = '{run.run_id}'", max_results=1)
        if known:
            self._run = known[0]
            self._client.update_run(self._run.info.run_id, status="RUNNING")
        else:
            name = self._name or run.folder.name
            self._run = self._client.create_run(experiment, run_name=name, tags={RUN_ID: run.run_id})
        self._logged = {
            (name, metric.step)
            for name in self._run.data.metrics
            for metric in self._client.get_metric_history(self._run.info.run_id, name)
        }
        logged = self._run.data.params
        params = [
            self._entities.Param(key, str(value)[:_LONGEST]) for key, value in run.settings.items() if key not in logged
        ]
        for start in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self._run.info.run_id, params=params[start : start + _AT_ONCE])

    def round(self, round: int, numbers: Mapping[str, float]) -> None:
        """Log the metrics of a round, except those that a resumed run repeats: MLflow would keep both values."""
        self._log(round, {name: number for name, number in numbers.items() if (name, round) not in self._logged})

    def _log(self, round: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, number, now, round) for name, number in numbers.items()]
        self._client.log_batch(self._run.info.run_id, metrics=metrics)

    def end(self, status: str, *, round: int, final: Mapping[str, float]) -> None:
        known = self._run.data.metrics
        self._log(round, {name: number for name, number in final.items() if known.get(name) != number})
        self._client.set_terminated(self._run.info.run_id, status=_ENDED[status])
