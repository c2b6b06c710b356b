"""ClientApp: trains SimCLR on the digits of this client."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from torch import nn

from strategies.flower import client_mod

app = ClientApp(mods=[client_mod])  # L-DAWA works without the mod; FedU, FedEMA and EUC need it
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # (1797, 1, 8, 8)


def make_network():
    """Return encoder and projector, with the same initial weights everywhere."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.ModuleDict({"encoder": nn.Sequential(*layers), "projector": nn.Linear(32, 32)})


@app.train()
def train(message, context):
    """Train one epoch: two noisy views of an image are close, those of other images are not."""
    network = make_network()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    mine = images[:1400][context.node_config["partition-id"] :: context.node_config["num-partitions"]]
    for batch in mine[torch.randperm(len(mine))].split(64):
        views = torch.cat([batch + 0.2 * torch.randn_like(batch) for _ in range(2)])
        z = nn.functional.normalize(network["projector"](network["encoder"](views)))
        similarities = (z @ z.T / 0.5).fill_diagonal_(-torch.inf)
        loss = nn.functional.cross_entropy(similarities, torch.arange(len(z)).roll(len(batch)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(mine), "train_loss": loss.item()})
    return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics}), reply_to=message)
