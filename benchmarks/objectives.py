"""Seconds per training step of seven objectives, relative to a plain loop with lightly's transform, head and loss.

    uv run python benchmarks/objectives.py [--methods dino swav] [--batch 64] [--steps 8] [--turns 5] [--threads 2]

Random images of 32x32, the same encoder, sizes of heads, optimizer (Adam) and batch on both sides; masked methods have
a vision transformer (patch 4, width 96, 4 blocks), the others `conv_small`. Everything runs in turn in one process.

ours:   `fedssl.training.train`, an epoch.
peer:   a DataLoader with two persistent workers and lightly's transform of PIL images, its head and its loss, and the
        standard loop (`lightly_loops.py`). It also copies the target network as its examples do.
bare:   our forward and backward passes on precomputed views: the time of the model alone.
ratio:  peer / ours (target: at least 1.5). limit: peer / bare, the ratio that no faster augmentation can exceed.

``*`` marks a missed target.
"""

import argparse
import statistics
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import to_pil_image

from benchmarks import lightly_loops as loops
from benchmarks.clients import Client, bare, ours
from benchmarks.common import make_parser, time_in_turn
from fedssl.encoders import conv_small

TARGET = 1.5
VIT = {"patch": 4, "width": 96, "depth": 4, "heads": 3}
VIT_OVERRIDES = ["encoder=vit_tiny", *(f"encoder.{key}={value}" for key, value in VIT.items())]
WIDTH = 128  # of conv_small's representation
HEAD = {"hidden": 512, "bottleneck": 64, "prototypes": 256}  # of DINO and iBOT

OVERRIDES = {
    "vicreg": ["augmentation=simclr"],
    "lejepa": ["augmentation=multi_crop"],
    "swav": ["augmentation=multi_crop", "method.queue_size=0"],
    "dino": ["augmentation=multi_crop"],
    "mae": ["augmentation=mae", *VIT_OVERRIDES],
    "ijepa": ["augmentation=ijepa", "encoder.pool=mean", *VIT_OVERRIDES],
    "ibot": ["augmentation=ibot", *VIT_OVERRIDES],
}


class Pictures(Dataset):
    """PIL images, transformed one at a time."""

    def __init__(self, images: torch.Tensor, transform: Callable[..., object]) -> None:
        self.images, self.transform = [to_pil_image(image) for image in images], transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> object:
        return self.transform(self.images[index])


def loop_of(client: Client) -> loops.Loop:
    """Return lightly's loop with the sizes of the client's method."""
    name, method = type(client.method).__name__.lower(), client.settings.model.method.values
    encoder = conv_small(channels=3, size=32)
    if name == "mae":
        return loops.mae(**VIT, sizes={key: method[f"decoder_{key}"] for key in ("width", "depth", "heads")})
    if name == "ijepa":
        return loops.ijepa(**VIT, sizes={key: method[f"predictor_{key}"] for key in ("width", "depth", "heads")})
    if name == "ibot":
        return loops.ibot(**VIT, **HEAD)
    if name == "dino":
        return loops.dino(encoder, WIDTH, **HEAD)
    head = method["projector"]
    sizes = {"hidden": head["hidden_dim"], "out": head["out_dim"]}
    if name == "swav":
        return loops.swav(encoder, WIDTH, **sizes, prototypes=method["num_prototypes"])
    if name == "vicreg":
        return loops.vicreg(encoder, WIDTH, **sizes, layers=head["num_layers"])
    return loops.lejepa(encoder, WIDTH, **sizes, layers=head["num_layers"], slices=method["num_slices"])


def peer(client: Client) -> Callable[[], float]:
    loop = loop_of(client)
    optimizer = torch.optim.Adam(loop.modules.parameters(), lr=1e-3)
    loader = DataLoader(
        Pictures(client.images, loop.transform),
        client.training.batch_size,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        collate_fn=loop.collate,
    )

    def epoch() -> float:
        losses = []
        for batch in loader:
            loss = loop.loss(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loop.on_step_end()
            losses.append(loss.item())
        return statistics.mean(losses)

    return epoch


def compare(name: str, options: argparse.Namespace) -> None:
    overrides = [f"method={name}", "optimizer=adam", f"batch_size={options.batch}", *OVERRIDES[name]]
    client = Client(overrides, num_images=options.batch * options.steps, device=torch.device("cpu"))
    client.training = replace(client.training, epochs=1)
    jobs = {"ours": ours(client), "peer": peer(client), "bare": bare(client)}
    seconds = {
        key: statistics.median(values) / options.steps
        for key, values in time_in_turn(jobs, turns=options.turns).items()
    }
    ratio, limit = seconds["peer"] / seconds["ours"], seconds["peer"] / seconds["bare"]
    print(
        f"| `{name}` | {1000 * seconds['ours']:.0f} | {1000 * seconds['peer']:.0f} | {1000 * seconds['bare']:.0f} | "
        f"{ratio:.2f}{'' if ratio >= TARGET else '*'} | {limit:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--methods", nargs="+", default=list(OVERRIDES), choices=list(OVERRIDES))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # lightly's modules and torch's weight normalization
    torch.set_num_threads(options.threads)
    print("| method | ours, ms per step | lightly, ms | model alone, ms | ratio | limit |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in options.methods:
        compare(name, options)


if __name__ == "__main__":
    main()
