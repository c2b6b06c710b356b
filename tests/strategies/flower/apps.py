"""ClientApps for tests of the strategies for Flower apps, and Flower's own loop in one process."""

from dataclasses import replace

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from client_app.app import app as our_client_app
from fedssl.wire.messages import ClientUpdate, TrainPlan
from simulation.grid import LocalGrid
from strategies.flower import client_mod

EXAMPLES, LOSS = "num-examples", "train_loss"


def record(layers):
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in layers.items()})


def arrays(record):
    return {name: array.numpy() for name, array in record.items()}


def reply(layers, **metrics):
    """The content of a reply as in Flower's templates; a metric of None is left out."""
    values = {EXAMPLES: 1, LOSS: 0.5} | metrics
    kept = {name: value for name, value in values.items() if value is not None}
    return RecordDict({"arrays": record(layers), "metrics": MetricRecord(kept)})


def app_of(train, *, mods=(client_mod,)):
    """A ClientApp that replies with ``train(client, round, layers, config)``: layers, or a content.

    Its evaluation reports the first number of the first array.
    """
    app = ClientApp(mods=list(mods))

    @app.train()
    def one_round(message, context):
        config, layers = message.content["config"], arrays(message.content["arrays"])
        result = train(context.node_config["partition-id"], config["server-round"], layers, config)
        return Message(result if isinstance(result, RecordDict) else reply(result), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        first = next(iter(message.content["arrays"].values())).numpy()
        metrics = MetricRecord({EXAMPLES: 1, "first": float(first.reshape(-1)[0])})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def run(strategy, app, layers, *, clients=2, rounds=1, grid=None):
    """Flower's own loop; the last arrays and the result."""
    strategy.min_available_nodes = strategy.min_train_nodes = clients
    strategy.min_evaluate_nodes = clients if strategy.fraction_evaluate else 0
    grid = grid or LocalGrid(app, num_clients=clients)
    result = strategy.start(grid=grid, initial_arrays=record(layers), num_rounds=rounds, timeout=60)
    return arrays(result.arrays), result


def plain_client_app(plan):
    """A ClientApp that knows nothing of strategies and trains as our clients do; a plan of theirs has the settings."""
    settings = TrainPlan.from_content(plan)
    app = ClientApp(mods=[client_mod])

    @app.train()
    def train(message, context):
        config, layers = message.content["config"], arrays(message.content["arrays"])
        stages = {}
        if "num-stages" in config:
            stages = {"num_stages": config["num-stages"], "num_frozen_stages": config["num-frozen-stages"]}
        metrics = ("num-examples", "train-loss")
        plan = replace(
            settings, round=config["server-round"], layers=layers, metrics=metrics, upload_names=None, **stages
        )
        message.content = plan.to_content()
        answer = our_client_app(message, context)
        assert not answer.has_error(), answer.error.reason
        update = ClientUpdate.from_content(answer.content, 0)
        answer.content = reply(layers | update.layers, **{EXAMPLES: update.num_examples, LOSS: update.train_loss})
        return answer

    @app.evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"metrics": MetricRecord({EXAMPLES: 1})}), reply_to=message)

    return app
