"""Two views of a batch: images per second of fedssl's augmentation, torchvision's on PIL images, and kornia's.

    uv run --group benchmarks python benchmarks/augmentation.py [--size 32] [--batch 128] [--threads 2]

Random images and the recipe ``simclr``: crop and flip, jitter, grayscale, blur, normalization. The candidates are timed
in turn, and the medians are compared: fedssl (targets: at least 6 times faster than the DataLoader and 2.5 times faster
than kornia, at 32x32 on two cores), a DataLoader with two workers that are started before the measurement, and kornia's
batched augmentation, if it is installed. The others blur in their fastest way: PIL's filter, and a 5x5 kernel in
kornia, where fedssl's is 13x13. On a GPU, fedssl and kornia are timed again. All have the settings of a run.
"""

import os
import random
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common import make_parser, time_in_turn
from fedssl.machine.process import OPENMP_ENV, set_allocator_thresholds

if __name__ == "__main__":  # not if training.py imports this module
    os.environ.update(OPENMP_ENV | os.environ)  # before torch is imported, as the command fedssl does

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image, ImageFilter
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from fedssl.augmentation import Augmentation

MEAN, STD = [0.491, 0.482, 0.446], [0.247, 0.243, 0.261]
RECIPE = Path(__file__).parents[1] / "conf" / "augmentation" / "simclr.yaml"


def pil_blur(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))


def pil_transform(size: int) -> transforms.Compose:
    """Return the torchvision transform of a view."""
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(size, scale=(0.2, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            transforms.RandomGrayscale(p=0.2),
            transforms.RandomApply([pil_blur], p=0.5),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


class PilViews(Dataset):
    """Two torchvision views of one PIL image at a time, as in a usual client."""

    def __init__(self, images: Tensor) -> None:
        self.images = images.permute(0, 2, 3, 1).contiguous().numpy()
        self.transform = pil_transform(images.shape[-1])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = Image.fromarray(self.images[index])
        return self.transform(image), self.transform(image)


def make_augmentation(size: int) -> Augmentation:
    """Return fedssl's augmentation of a run."""
    dataset = {"size": size, "mean": MEAN, "std": STD}
    config = OmegaConf.create({"gpu_augmentation": "torch", "dataset": dataset, "augmentation": OmegaConf.load(RECIPE)})
    return instantiate(config.augmentation)


def fedssl_epoch(images: Tensor, batch: int) -> Callable[[], None]:
    augmentation, generator = make_augmentation(images.shape[-1]), torch.Generator().manual_seed(0)

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


def clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def compare(title: str, candidates: dict[str, Callable[[], None]], *, num_images: int, repeats: int) -> None:
    """Print the median rates of all candidates, and the speed of the first relative to the others."""
    seconds = time_in_turn(candidates, turns=repeats, clock=clock)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ours = next(iter(median.values()))
    print(title)
    for name, value in median.items():
        print(f"  {name:34s} {num_images / value:9.0f} images/s   fedssl is {value / ours:5.2f}x as fast")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--num-images", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kept = set_allocator_thresholds()
    print(f"allocator keeps freed memory: {kept}, threads: {options.threads}, batch: {options.batch}")
    shape = (options.num_images, 3, options.size, options.size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    candidates = {
        "fedssl": fedssl_epoch(images, options.batch),
        "torchvision/PIL DataLoader 2 workers": pil_epoch(images, options.batch),
    }
    with_kornia = find_spec("kornia") is not None
    if with_kornia:
        candidates["kornia"] = kornia_epoch(images, options.batch)
    else:
        print("kornia is not installed: uv sync --group benchmarks")
    compare(f"CPU, {options.size}x{options.size}", candidates, num_images=options.num_images, repeats=options.repeats)
    if torch.cuda.is_available():
        on_gpu = images.cuda()
        candidates = {"fedssl": fedssl_epoch(on_gpu, options.batch)}
        if with_kornia:
            candidates["kornia"] = kornia_epoch(on_gpu, options.batch)
        compare(torch.cuda.get_device_name(), candidates, num_images=options.num_images, repeats=options.repeats)


if __name__ == "__main__":
    main()
