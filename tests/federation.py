"""A federation on digits that is small enough for tests and keeps all its messages."""

from pathlib import Path

import numpy as np
import torch
from flwr.clientapp import ClientApp

from client_app.app import app as client_app
from fedssl.config import compose, make
from fedssl.methods import build
from fedssl.model_layers import travelling_layers
from server_app.app import find_nodes, make_schedule, make_staging, run_round, train_config
from simulation.local_grid import LocalGrid
from strategies.base import FedSSLStrategy

TINY = ["num_clients=5", "local_epochs=1", "dataset.limit=100", "encoder.width=4", "threads=1", "partition=iid"]


class Federation:
    """Rounds of the unchanged apps on the local engine, without a run folder."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.settings = compose([*TINY, f"output_dir={folder}", *words])
        self.plans, self.updates = [], []
        app = ClientApp()

        @app.query("who")
        def who(message, context):
            return client_app(message, context)

        @app.train()
        def train(message, context):
            self.plans.append(message.content)
            reply = client_app(message, context)
            assert not reply.has_error(), reply.error.reason
            self.updates.append(reply.content)
            return reply

        self.grid = LocalGrid(app, num_clients=self.settings.num_clients)
        self.method = build(self.settings)
        self.strategy: FedSSLStrategy = make(self.settings.strategy)
        self.strategy.server_optimizer = make(self.settings.server_optimizer)
        self.strategy.check(self.method, clients_per_round=self.settings.clients_per_round)
        self.schedule = make_schedule(self.settings, self.method)
        self.strategy.staging = make_staging(self.settings, self.method, self.schedule, torch.device("cpu"))
        self.layers = travelling_layers(self.method)
        self.config = train_config(self.settings, find_nodes(self.grid, self.settings.num_clients))

    def run(self, *rounds: int) -> dict[str, np.ndarray]:
        for round in rounds:
            self.layers = run_round(self.grid, self.strategy, round, self.layers, config=self.config, timeout=60)
        return self.layers
