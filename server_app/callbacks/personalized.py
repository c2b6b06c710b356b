"""Personalized evaluation of a finished run, see `server_app.personalization`."""

import json
import logging
from dataclasses import asdict
from pathlib import Path

from fedssl.atomic_files import write_text
from fedssl.evaluation.scores import format_table, to_flat_dict
from fedssl.runs.jsonl import read_jsonl
from fedssl.schedule.stages import set_active_stages
from server_app.build import RunComponents
from server_app.callbacks.base import Callback, RunEnd
from server_app.messaging import ClientMessenger
from server_app.personalization import evaluate_personalized, mean_over_clients
from server_app.run_folder import PERSONALIZED_FILE

log = logging.getLogger("fedssl")


class Personalized(Callback):
    """Evaluates the encoders of all clients, and writes the results."""

    def __init__(self, messenger: ClientMessenger, components: RunComponents, folder: Path) -> None:
        self._messenger, self._components, self._folder = messenger, components, folder

    def on_run_end(self, end: RunEnd) -> None:
        if end.status != "finished":
            return
        components = self._components
        trained = {line["client"] for line in read_jsonl(self._folder / "clients.jsonl", required=("client",))}
        with set_active_stages(components.method, depth=components.context.phases[-1].depth):
            results = evaluate_personalized(
                self._messenger,
                components,
                end.state,
                trained=trained,
                epochs=components.settings.evaluation.adaptation_epochs,
            )
        if not results:
            log.warning("no client returned a personalized encoder")
            return
        averages = mean_over_clients(results)
        rows = [
            {**asdict(row), "global_test": to_flat_dict(row.global_test), "local_test": to_flat_dict(row.local_test)}
            for row in results
        ]
        end.personalized = {name: to_flat_dict(scores) for name, scores in averages.items()}
        write_text(self._folder / PERSONALIZED_FILE, json.dumps({"means": end.personalized, "clients": rows}, indent=1))
        log.info("personalized encoders, means over clients\n%s", format_table(averages))
