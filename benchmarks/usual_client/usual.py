"""The app that `ray_engine.py` compares with: empty rounds, and rounds of a usual client under Flower's FedAvg.

For each message, the usual client creates the model, loads the data set from a file and starts a DataLoader with two
workers. It fetches one batch and takes no optimizer step, so that only the overhead is measured.
"""

import json
import shlex
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

from server_app.messaging import receive

client = ClientApp()
server = ServerApp()


def model() -> torch.nn.Module:
    """Return a ResNet-18 for small images."""
    network = resnet18(num_classes=128)
    network.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    return network


@client.query()
def empty(message: Message, context: Context) -> Message:
    """Return an empty reply."""
    return Message(RecordDict(), reply_to=message)


@client.train()
def usual(message: Message, context: Context) -> Message:
    """Run the overhead of a client's training."""
    network = model()
    network.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    images = torch.load(str(message.content.config_records["config"]["images"]))
    next(iter(DataLoader(TensorDataset(images), batch_size=64, shuffle=True, num_workers=2)))
    metrics = MetricRecord({"num-examples": len(images)})
    content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, and write their seconds to ``summary.json``."""
    overrides = dict(word.split("=", 1) for word in shlex.split(str(context.run_config["overrides"])))
    clients = int(overrides["num_clients"])
    while len(nodes := list(grid.get_node_ids())) < clients:
        time.sleep(0.05)
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=clients)
    arrays = ArrayRecord(model().state_dict())
    seconds: dict[str, list[float]] = {"empty": [], "usual": []}
    rounds = range(1, int(overrides["rounds"]) + 1)
    for _ in rounds:
        start = time.monotonic()
        messages = [Message(RecordDict(), node, "query") for node in nodes]
        assert not any(reply.has_error() for reply in receive(grid, messages, timeout=600))
        seconds["empty"].append(time.monotonic() - start)
    for round in rounds:
        start = time.monotonic()
        # the training part of Flower's `Strategy.start`
        config = ConfigRecord({"images": overrides["images"]})
        replies = list(grid.send_and_receive(strategy.configure_train(round, arrays, config, grid), timeout=600))
        assert len(replies) == clients
        assert not any(reply.has_error() for reply in replies)
        arrays, _ = strategy.aggregate_train(round, replies)  # type: ignore[assignment]  # None only if all failed
        seconds["usual"].append(time.monotonic() - start)
    summary = {"status": "finished", "rounds": sum(map(len, seconds.values())), "seconds": seconds}
    Path(overrides["output_dir"], "summary.json").write_text(json.dumps(summary))
