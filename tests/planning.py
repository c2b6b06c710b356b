"""Small runs whose cost is counted and measured, and their components."""

from fedssl.config.load import load_settings, with_run_folder
from server_app.build import build_run
from simulation.grid import LocalGrid, load_client_app

QUICK = ["num_clients=5", "clients_per_round=3", "rounds=4", "local_epochs=1", "dataset.limit=100", "encoder.width=4"]
QUICK += ["dataset.test_limit=40", "threads=1", "engine=local", "evaluate_every=0", "collapse_images=0"]
QUICK += ["final_evaluation=none"]


def build(overrides, folder):
    settings = with_run_folder(load_settings(overrides), folder)
    return build_run(LocalGrid(load_client_app(), num_clients=settings.num_clients), settings)
