"""MLflow: a SQLite database in the run folder, or a tracking server."""

import os
import time
from collections.abc import Mapping

from fedssl.errors import InputError
from server_app.trackers.base import MISSING_PACKAGE, TrackedRun

RUN_ID = "fedssl.run_id"  # the tag by which a resumed run finds its own

_LONGEST = 6000  # characters of a parameter's value
_AT_ONCE = 100  # parameters of a message
_ENDED = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MLflow:
    """A run with fedssl's id as a tag, so that a resumed run goes on with it.

    Parameters
    ----------
    experiment : str
    run : str or None
        Its name; None: that of the run folder.
    uri : str or None
        Of a tracking server or a database, as MLflow takes it; None: ``mlflow.db`` in the run folder.

    Raises
    ------
    InputError
        The package is missing.
    """

    def __init__(self, *, experiment: str, run: str | None, uri: str | None) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a run sends nothing that nobody asked for
        # A server that is gone is to cost a run seconds: MLflow's own are 7 retries, some of them minutes apart.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        try:
            import mlflow.entities
            import mlflow.tracking
        except ImportError as error:
            raise InputError(
                MISSING_PACKAGE.format("tracker=mlflow", "mlflow-skinny", "mlflow", "mlflow-skinny")
            ) from error
        self._entities, self._client_class = mlflow.entities, mlflow.tracking.MlflowClient
        self._experiment, self._name, self._uri = experiment, run, uri

    def begin(self, run: TrackedRun) -> None:
        """Make the run, or find the one that has the tag; parameters that it has stay as they are."""
        self._client = self._client_class(tracking_uri=self._uri or f"sqlite:///{run.folder / 'mlflow.db'}")
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
        known = self._client.search_runs([experiment], f"tags.`{RUN_ID}` = '{run.run_id}'", max_results=1)
        if known:
            self._run = known[0]
            self._client.update_run(self._run.info.run_id, status="RUNNING")
        else:
            name = self._name or run.folder.name
            self._run = self._client.create_run(experiment, run_name=name, tags={RUN_ID: run.run_id})
        said = self._run.data.params
        params = [
            self._entities.Param(key, str(value)[:_LONGEST]) for key, value in run.settings.items() if key not in said
        ]
        for start in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self._run.info.run_id, params=params[start : start + _AT_ONCE])

    def round(self, round: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers as one message."""
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, number, now, round) for name, number in numbers.items()]
        self._client.log_batch(self._run.info.run_id, metrics=metrics)

    def end(self, status: str, *, round: int, final: Mapping[str, float]) -> None:
        """Write the final results and how the run ended."""
        self.round(round, final)
        self._client.set_terminated(self._run.info.run_id, status=_ENDED[status])
