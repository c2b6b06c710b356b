"""Encoded images: images per second of fedssl, torchvision, WebDataset and FFCV, and a run on very many images.

    uv run python benchmarks/storage.py --source FILE.parquet                        # three minutes
    uv run python benchmarks/storage.py --source FILE.parquet --many 1281167         # ten minutes, 11 GB in the folder

``--source`` are images of Tiny ImageNet or CIFAR-10, from which `benchmarks.made_jpegs` makes JPEGs of 224 x 224
pixels. Everything uses two threads or two processes and is timed in turn. The fastest turns are compared, because
other programs slow down any turn.
1. decoding: `Decoding` in threads, the images that reach a trivial step of `fedssl.training.train` (target: at least
   0.9 of these), and, if they are installed, WebDataset and FFCV. FFCV encodes the images again.
2. two standardized views, without augmentation: fedssl, `ImageFolder` with a `DataLoader` (target: at least 1.5 times
   as fast), WebDataset.
3. two views of SimCLR, of the same.
4. many: make the index of these images; then a run of two rounds with 4 of 1,000 clients starts in a memory cgroup
   of 4 GB. Seconds until images and partition are known, and the peak of the memory that is no file (RssAnon).
"""

import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common import make_parser, time_in_turn
from fedssl.machine.process import OPENMP_ENV, set_allocator_thresholds

if __name__ == "__main__":
    os.environ.update(OPENMP_ENV | os.environ)  # before torch is imported, as the command fedssl does

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from benchmarks.augmentation import MEAN, STD, make_augmentation, pil_transform
from benchmarks.made_jpegs import SIZE, JpegMaker, write_arrow, write_folder
from fedssl.datasets import images as storage
from fedssl.datasets.decoding import Decoding
from fedssl.datasets.folder import read
from fedssl.datasets.images import EncodedImages
from fedssl.methods.base import SSLMethod
from fedssl.regularizers.base import Regularizer
from fedssl.training import Augment, LocalTrainer, options_of, train
from fedssl.views import Views
from tests.encoders import LinearEncoder
from tests.memory_cgroup import memory_cgroup

BATCH, WORKERS = 128, 2
TRIVIAL, FASTER = 0.9, 1.5  # targets
LIMIT = 4 * 10**9  # bytes of the run on many images
STANDARDIZE = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])

Job = Callable[[], object]


class TrivialViews:
    """A pixel of each image, which costs nothing."""

    def sample_params(self, sizes: Sequence[int], **_: object) -> list[None]:
        return [None] * len(sizes)

    def apply(self, images: Tensor, params: None, *, layout: torch.memory_format) -> Views:
        view = images[:, :, :1, :1].float()
        return Views.of(view, view)


class TrivialMethod(SSLMethod):
    """A model with three weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = LinearEncoder([[0.0, 0.0, 0.0]])

    def loss(self, views: Views) -> Tensor:
        return self.encoder(views[0].images.flatten(1)).mean()


def decoder(images: EncodedImages) -> Job:
    records = images._records
    pieces = np.array_split(np.random.default_rng(0).permutation(len(records)), len(records) // 8)
    decoding = Decoding(channels=3, size=SIZE)

    def decode(piece: np.ndarray) -> None:
        for index in piece:
            decoding(records[index])

    pool = ThreadPoolExecutor(WORKERS)
    return lambda: list(pool.map(decode, pieces))


def trivial_training(images: EncodedImages) -> Job:
    method = TrivialMethod()
    optimizer = torch.optim.SGD(method.parameters(), lr=1e-6)
    training = LocalTrainer(
        augment=TrivialViews(),
        optimizer=optimizer,
        base_options=options_of(optimizer),
        regularizer=Regularizer(),
        epochs=1,
        batch_size=BATCH,
        precision="fp32",
        clip_norm=None,
        channels_last=False,
    )
    indices, generator = torch.arange(len(images)), torch.Generator().manual_seed(0)
    return lambda: train(method, images, indices, training=training, generator=generator)


def standardized(batch: Tensor, generator: torch.Generator) -> Views:
    """Return two views without augmentation."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (MEAN, STD))
    return Views.of(*(batch.float().mul_(1 / (255 * std)).sub_(mean / std) for _ in range(2)))


def two_views(images: EncodedImages, augment: Augment) -> Job:
    generator = torch.Generator().manual_seed(0)

    def epoch() -> None:
        rows = torch.randperm(len(images), generator=generator).split(BATCH)
        for batch in images.prefetch(rows):
            augment(batch, generator)

    return epoch


def image_folder(folder: Path, transform: transforms.Compose) -> Job:
    data = ImageFolder(folder, lambda image: (transform(image), transform(image)))
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True)
    return lambda: exhaust(loader)


def web_dataset(shards: str, transform: transforms.Compose | None) -> Job:
    import webdataset as wds

    views = np.asarray if transform is None else lambda image: (transform(image), transform(image))

    decoded = wds.WebDataset(shards, shardshuffle=WORKERS, seed=0).shuffle(1000).decode("pil").to_tuple("jpg")
    data = decoded.map_tuple(views).batched(BATCH)
    loader = DataLoader(data, None, num_workers=WORKERS, persistent_workers=True)
    return lambda: exhaust(loader)


def ffcv_loader(file: Path, source: Path) -> Job:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.rgb_image import SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import ToTensor
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=75), "label": IntField()}
    DatasetWriter(str(file), fields, num_workers=WORKERS).from_indexed_dataset(ImageFolder(source))
    pipelines = {"image": [SimpleRGBImageDecoder(), ToTensor()], "label": None}
    loader = Loader(
        str(file), BATCH, num_workers=WORKERS, order=OrderOption.RANDOM, pipelines=pipelines, drop_last=False
    )
    return lambda: exhaust(loader)


def exhaust(loader: Iterable[object]) -> None:
    for _ in loader:
        pass


def write_shards(folder: Path, target: Path) -> str:
    """Write the images of a folder into one tar file for each process, as WebDataset reads them."""
    files = sorted(folder.rglob("*.jpg"))
    for number in range(WORKERS):
        with tarfile.open(target / f"shard-{number}.tar", "w") as tar:
            for file in files[number::WORKERS]:
                tar.add(file.resolve(), file.name)
    return str(target / f"shard-{{0..{WORKERS - 1}}}.tar")


def report(jobs: dict[str, Job], *, count: int, turns: int) -> dict[str, float]:
    seconds = time_in_turn(jobs, turns=turns)
    rates = {name: count / min(values) for name, values in seconds.items()}
    for name, rate in rates.items():
        median, ratio = count / statistics.median(seconds[name]), rates["fedssl"] / rate
        print(f"  {name:24}{rate:8.0f} images/s (median {median:.0f}), fedssl is {ratio:.2f} times as fast", flush=True)
    return rates


def compare(source: Path, *, count: int, turns: int) -> None:
    set_allocator_thresholds()  # as in a run
    storage.THREADS = WORKERS
    torch.set_num_threads(WORKERS)
    with tempfile.TemporaryDirectory(prefix="fedssl-storage-") as name:
        root, maker = Path(name), JpegMaker(source)
        for part in ("arrow", "shards"):
            (root / part).mkdir()
        write_arrow(root / "arrow", maker, count)
        write_folder(root / "files", maker, count)
        shards = write_shards(root / "files", root / "shards")
        settings = {"path": str(root / "arrow"), "hub": "", "image": "image", "label": "label"}
        data = read("train", channels=3, size=SIZE, limit=None, storage="encoded", **settings)
        assert data is not None
        assert isinstance(data.images, EncodedImages)
        with_webdataset, with_ffcv = find_spec("webdataset"), find_spec("ffcv")
        jobs = {"Decoding in threads": decoder(data.images), "fedssl": trivial_training(data.images)}
        if with_webdataset:
            jobs["WebDataset"] = web_dataset(shards, None)
        if with_ffcv:
            jobs["FFCV"] = ffcv_loader(root / "images.beton", root / "files")
        print(f"decoding, {count} images of {SIZE} px, {WORKERS} threads or processes")
        rates = report(jobs, count=count, turns=turns)
        print(f"  reached {rates['fedssl'] / rates['Decoding in threads']:.2f}, target {TRIVIAL}")
        for title, augment, transform, share in (
            ("two standardized views", standardized, STANDARDIZE, 1),
            ("two views of SimCLR", make_augmentation(SIZE), pil_transform(SIZE), 8),
        ):
            part, folder = count // share, root / f"files-{share}"
            for file in sorted((root / "files").rglob("*.jpg"))[:part]:
                (folder / file.parent.name).mkdir(parents=True, exist_ok=True)
                (folder / file.parent.name / file.name).symlink_to(file)
            print(f"{title}, {part} images", flush=True)
            jobs = {
                "fedssl": two_views(data.images.subset(torch.arange(part)), augment),
                "ImageFolder": image_folder(folder, transform),
            }
            if with_webdataset:
                (root / f"shards-{share}").mkdir()
                jobs["WebDataset"] = web_dataset(write_shards(folder, root / f"shards-{share}"), transform)
            rates = report(jobs, count=part, turns=turns)
            print(f"  reached {rates['fedssl'] / rates['ImageFolder']:.2f}, target {FASTER}")


START = """
import sys, time
start = time.perf_counter()
from fedssl.config.load import compose
from fedssl.datasets.base import load_federated
from fedssl.partition import client_indices
settings = compose(sys.argv[1:])
images = load_federated(settings.data)
client_indices(settings.partition, images)
print(f"{time.perf_counter() - start:.1f} s until {len(images.images):,} images and their partition are known")
"""


def run_on_many(source: Path, folder: Path, *, count: int) -> None:
    """Measure part 4, and print it; images that an earlier call has made in ``folder`` are used again."""
    if not (folder / "data").is_dir():
        (folder / "data").mkdir(parents=True)
        print(f"{write_arrow(folder / 'data', JpegMaker(source), count) / 1e9:.1f} GB of images", flush=True)
    data = [f"dataset.path={folder / 'data'}", f"dataset.cache={folder / 'cache'}", "dataset.num_classes=1000"]
    data += ["dataset=tiny_imagenet", f"dataset.size={SIZE}", "dataset.storage=encoded", "num_clients=1000"]
    for name in ("index", "start"):
        print(f"{name}: ", end="", flush=True)
        subprocess.run([sys.executable, "-c", START, *data], check=True)
    overrides = [*data, "clients_per_round=4", "rounds=2", "local_epochs=1", "encoder.width=4", "engine=local"]
    overrides += ["evaluation=none", "final_evaluation=none", "collapse_images=0", "threads=2", "device=cpu"]
    overrides.append(f"output_dir={tempfile.mkdtemp(prefix='fedssl-many-')}")
    with memory_cgroup(LIMIT) as group:
        start, peak = time.perf_counter(), 0
        command = group.command([str(Path(sys.executable).parent / "fedssl"), *overrides])
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while child.poll() is None:
            peak = max(peak, group.anonymous())
            time.sleep(0.05)
        seconds = time.perf_counter() - start
        print(f"run: exit status {child.returncode} after {seconds:.0f} s, {group.oom_kills()} killed for memory")
    print(f"  peak of memory that is no file: {peak / 1e9:.2f} GB of {LIMIT / 1e9:.0f} GB")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--many", type=int)
    parser.add_argument("--folder", type=Path, default=Path("many-images"))
    options = parser.parse_args()
    if options.many:
        run_on_many(options.source, options.folder, count=options.many)
        return
    compare(options.source, count=options.count, turns=options.turns)


if __name__ == "__main__":
    main()
