"""Train an encoder on digits of ten clients in plain PyTorch, with losses, partitions and probes of fedssl.

    python examples/without_engine.py [ROUNDS]

Neither Flower nor Ray is used: clients take turns in a loop, and the server averages their weights (FedAvg).
"""

import copy
import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedssl.datasets.images import TensorImages
from fedssl.encoders import conv_small
from fedssl.evaluation import KNN, EvaluationInput, LabeledImages, LinearProbe, evaluate
from fedssl.losses import nt_xent
from fedssl.partition import ImageSubset, PartitionInput, dirichlet

MEAN, STD = 0.3, 0.4  # of pixels in [0, 1]


def view(images: Tensor) -> Tensor:
    """Return standardized images, each moved by up to a pixel, brighter or darker, and noisy."""
    padded = nn.functional.pad(images / 255, (1, 1, 1, 1))
    moves = torch.randint(3, (len(images), 2)).tolist()
    moved = torch.stack([image[:, y : y + 8, x : x + 8] for image, (y, x) in zip(padded, moves, strict=True)])
    return (torch.empty(len(images), 1, 1, 1).uniform_(0.6, 1.4) * moved + 0.1 * torch.randn_like(moved) - MEAN) / STD


def train(network: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Train a copy of the network for an epoch on the images of a client, and return its weights."""
    network = copy.deepcopy(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for batch in images[torch.randperm(len(images))].split(64):
        if len(batch) > 1:
            optimizer.zero_grad()
            nt_xent(network(view(batch)), network(view(batch)), temperature=0.5).backward()
            optimizer.step()
    return network.state_dict()


def average(clients: list[dict[str, Tensor]], shares: list[float]) -> dict[str, Tensor]:
    """Return the mean of the clients' weights by their shares of the images."""
    pairs, first = list(zip(shares, clients, strict=True)), clients[0]
    return {name: sum(share * client[name] for share, client in pairs).to(first[name].dtype) for name in first}


def main(rounds: int) -> None:
    """Train, and print the accuracy of probes on the encoder before and after it, and on raw pixels."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more are slower on small images
    pixels, targets = map(torch.from_numpy, load_digits(return_X_y=True))
    images = (pixels * 255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8)
    known, new = (LabeledImages(TensorImages(images[s]), targets[s]) for s in (slice(1200), slice(1200, None)))
    data = ImageSubset(known.images, rows=torch.arange(1200))
    parts = dirichlet(PartitionInput(labels=known.labels, images=data, num_clients=10, seed=0), alpha=0.5, min_size=2)
    encoder = conv_small(channels=1, size=8, width=16)
    network = nn.Sequential(encoder, nn.Linear(encoder.feature_dim, 64), nn.ReLU(), nn.Linear(64, 32))

    def report(name: str, encoder: nn.Module | None) -> None:
        statistics = {"mean": (MEAN,), "std": (STD,), "device": torch.device("cpu")}
        evaluated = EvaluationInput(encoder=encoder, train=known, test=new, **statistics)
        scores = [evaluate(probe, evaluated, seed=0) for probe in (KNN(k=20), LinearProbe())]
        print(f"{name:10}", *(f"{key} {score.text}" for found in scores for key, score in found.items()))

    report("pixels", None)
    report("untrained", encoder)
    for _ in range(rounds):
        clients = [train(network, images[part]) for part in parts]
        network.load_state_dict(average(clients, shares=[len(part) / 1200 for part in parts]))
    report("federated", encoder)


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].isdecimal():
        sys.exit(f"ROUNDS={sys.argv[1]} is not a number of rounds; give one, such as 20")
    main(rounds=int(sys.argv[1]) if len(sys.argv) > 1 else 20)
