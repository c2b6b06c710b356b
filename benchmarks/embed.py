"""Throughput and memory of ``fedssl-embed``, relative to the encoder alone in the same run.

    python benchmarks/embed.py [--backend onnx] [--images 2000] [--size 64] [--pixels 96]

The encoder is a ResNet-18 with random weights, the images are JPEG of noise. Decoding and inference share the cores, so
that on a CPU the ratio is at most the encoder's share of the work. Run it on an idle machine.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from fedssl.machine.process import OPENMP_ENV

os.environ.update(OPENMP_ENV | os.environ)  # before torch is imported, as the command does

from fedssl import encoders
from fedssl.embedding import load_embedder
from fedssl.embedding.cli import write_features
from fedssl.embedding.image_list import list_images
from fedssl.export import save_encoder
from fedssl.export.cli import run as export
from fedssl.machine.memory import gigabytes, peak_memory

REPETITIONS = 3


def write_images(folder: Path, count: int, pixels: int) -> None:
    generator = np.random.default_rng(0)
    for number in range(count):
        (folder / str(number // 1000)).mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(generator.integers(0, 256, (pixels // 8, pixels // 8, 3), dtype=np.uint8))
        small.resize((pixels, pixels)).save(folder / str(number // 1000) / f"{number:07}.jpg")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="torch")
    for name, default in (("images", 2000), ("size", 64), ("pixels", 96)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        write_images(here / "images", options.images, options.pixels)
        arguments = {"channels": 3, "size": options.size, "stem": "imagenet"}
        settings, encoder = {"_target_": "fedssl.encoders.resnet18", **arguments}, encoders.resnet18(**arguments)
        save_encoder(here / "encoder.pt", encoder, settings=settings, mean=[0.5] * 3, std=[0.25] * 3, metadata={})
        if options.backend == "onnx":
            export([f"encoder={here / 'encoder.pt'}", "format=onnx"])
        embedder = load_embedder(here / "encoder.pt", backend=options.backend)
        size, pixels = embedder.size, embedder.pixels
        images = list_images(here / "images", channels=3, size=size, pixels=pixels, settings={})
        batch = next(images.blocks(embedder.batch_size)).images
        embedder(batch)  # warm-up
        blocks = [batch] * max(1, options.images // len(batch))
        share = len(blocks) * len(batch) / options.images
        alone, decoding, together = [], [], []
        for number in range(REPETITIONS):
            alone.append(seconds(lambda: [embedder(block) for block in blocks]) / share)
            decoding.append(seconds(lambda: [None for _ in images.blocks(embedder.batch_size)]))
            file = here / f"features-{number}.parquet"
            together.append(seconds(lambda file=file: write_features(embedder, images, file, skip_unreadable=False)))
        ratio = statistics.median(one / both for one, both in zip(alone, together, strict=True))
        bound = statistics.median(one / (one + other) for one, other in zip(alone, decoding, strict=True))
        speeds = [options.images / statistics.median(times) for times in (alone, decoding, together)]
        print(
            f"encoder alone {speeds[0]:,.0f} images/s, decoding {speeds[1]:,.0f}, fedssl-embed {speeds[2]:,.0f}: "
            f"{ratio:.2f} of the encoder ({bound:.2f} if both need all cores); peak {gigabytes(peak_memory())}"
        )


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
