"""Two views of a batch: images per second of fedssl's augmentation, torchvision's on PIL images, and kornia's.

    uv run --group benchmarks python benchmarks/augmentation.py [--size 32] [--batch 128] [--threads 2]

Random images, the recipe ``simclr``: crop and flip, jitter, grey, blur, normalise. The ways are timed in turn in one
process and the medians compared: fedssl (targets: at least 6x the DataLoader and 2.5x kornia, at 32x32 on two cores);
the usual DataLoader with two workers, which are started before the clock and kept; kornia's batched augmentation, left
out where it is not installed. The peers blur in their fastest way: PIL's filter, and a 5x5 kernel in kornia, where
fedssl's is 13x13. With a GPU, fedssl and kornia are timed there as well. Both have the settings of a run.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from fedssl.machine.threads import OPENMP_ENV, tune_allocator

if __name__ == "__main__":  # not where others take the usual client from here
    os.environ.update(OPENMP_ENV | os.environ)  # before torch is imported, as the command fedssl does

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image, ImageFilter
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

MEAN, STD = [0.491, 0.482, 0.446], [0.247, 0.243, 0.261]
RECIPE = Path(__file__).parents[1] / "conf" / "augmentation" / "simclr.yaml"


def pil_blur(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))


class PilViews(Dataset):
    """Two torchvision views of one PIL image at a time: the usual client."""

    def __init__(self, images: Tensor) -> None:
        self.images = images.permute(0, 2, 3, 1).contiguous().numpy()
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(images.shape[-1], scale=(0.2, 1.0)),
                transforms.RandomHorizontalFlip(),
                transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
                transforms.RandomGrayscale(p=0.2),
                transforms.RandomApply([pil_blur], p=0.5),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = Image.fromarray(self.images[index])
        return self.transform(image), self.transform(image)


def fedssl_epoch(images: Tensor, batch: int) -> Callable[[], None]:
    dataset = {"size": images.shape[-1], "mean": MEAN, "std": STD}
    config = OmegaConf.create({"gpu_augmentation": "torch", "dataset": dataset, "augmentation": OmegaConf.load(RECIPE)})
    augmentation, generator = instantiate(config.augmentation), torch.Generator().manual_seed(0)

    def epoch() -> None:
        for part in images.split(batch):
            augmentation(part, generator)

    return epoch


def kornia_epoch(images: Tensor, batch: int) -> Callable[[], None]:
    import kornia.augmentation as K

    size = images.shape[-1]
    augmentation = torch.nn.Sequential(
        K.RandomResizedCrop((size, size), scale=(0.2, 1.0)),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        K.RandomGrayscale(p=0.2),
        K.RandomGaussianBlur((5, 5), (0.1, 2.0), p=0.5),
        K.Normalize(MEAN, STD),
    ).to(images.device)

    def epoch() -> None:
        for part in images.split(batch):
            floats = part.float() / 255
            augmentation(floats)
            augmentation(floats)

    return epoch


def pil_epoch(images: Tensor, batch: int) -> Callable[[], None]:
    loader = DataLoader(PilViews(images), batch_size=batch, num_workers=2, persistent_workers=True)

    def epoch() -> None:
        for _ in loader:
            pass

    return epoch


def in_turn(ways: Mapping[str, Callable[[], object]], *, turns: int) -> dict[str, list[float]]:
    """Seconds of each way, one number per turn."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, epoch in ways.items():
            start = time.perf_counter()
            epoch()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn > 0:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def compare(title: str, ways: dict[str, Callable[[], None]], *, num_images: int, repeats: int) -> None:
    """Time the ways in turn and print the median rates; the first way is the one compared with the others."""
    seconds = in_turn(ways, turns=repeats)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    own = next(iter(median.values()))
    print(title)
    for name, value in median.items():
        print(f"  {name:34s} {num_images / value:9.0f} images/s   fedssl is {value / own:5.2f}x as fast")


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of making two views of a batch of images.")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--num-images", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"allocator keeps freed memory: {tune_allocator()}, threads: {options.threads}, batch: {options.batch}")
    shape = (options.num_images, 3, options.size, options.size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    ways = {
        "fedssl": fedssl_epoch(images, options.batch),
        "torchvision/PIL DataLoader 2 workers": pil_epoch(images, options.batch),
    }
    with_kornia = find_spec("kornia") is not None
    if with_kornia:
        ways["kornia"] = kornia_epoch(images, options.batch)
    else:
        print("kornia is not installed and left out: uv sync --group benchmarks")
    compare(f"CPU, {options.size}x{options.size}", ways, num_images=options.num_images, repeats=options.repeats)
    if torch.cuda.is_available():
        on_gpu = images.cuda()
        ways = {"fedssl": fedssl_epoch(on_gpu, options.batch)}
        if with_kornia:
            ways["kornia"] = kornia_epoch(on_gpu, options.batch)
        compare(torch.cuda.get_device_name(), ways, num_images=options.num_images, repeats=options.repeats)


if __name__ == "__main__":
    main()
