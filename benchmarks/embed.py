"""Time and memory of ``fedssl-embed``: share of the encoder's own throughput, and growth with the number of images.

    python benchmarks/embed.py [--backend onnx] [--images 2000] [--size 64] [--pixels 96]

The encoder is a ResNet-18 with random weights, the images are JPEG of noise. Decoding and inference share the cores, so
that on a CPU the ratio is at most the encoder's share of both. Run it on an idle machine.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from fedssl import encoders
from fedssl.embedding import load_embedder
from fedssl.embedding.cli import write_features
from fedssl.embedding.image_list import list_images
from fedssl.export import save_encoder
from fedssl.export.cli import run as export
from fedssl.machine.memory import gigabytes, peak_memory


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
        settings = {"_target_": "fedssl.encoders.resnet18", "channels": 3, "size": options.size}
        encoder = encoders.resnet18(channels=3, size=options.size)
        save_encoder(here / "encoder.pt", encoder, settings=settings, mean=[0.5] * 3, std=[0.25] * 3, metadata={})
        if options.backend == "onnx":
            export([f"encoder={here / 'encoder.pt'}", "format=onnx"])
        embedder = load_embedder(here / "encoder.pt", backend=options.backend)
        size, pixels = embedder.size, embedder.pixels
        images = list_images(here / "images", channels=3, size=size, pixels=pixels, settings={})
        batch = next(images.blocks(embedder.batch_size)).images
        embedder(batch)  # warm-up
        start = time.perf_counter()
        for _ in range(repeats := max(1, options.images // len(batch))):
            embedder(batch)
        alone = repeats * len(batch) / (time.perf_counter() - start)
        start = time.perf_counter()
        for _ in images.blocks(embedder.batch_size):
            pass
        decoding = options.images / (time.perf_counter() - start)
        start = time.perf_counter()
        write_features(embedder, images, here / "features.parquet", skip_unreadable=False)
        speed = options.images / (time.perf_counter() - start)
        print(
            f"encoder alone {alone:,.0f} images/s, decoding alone {decoding:,.0f}, fedssl-embed {speed:,.0f}: "
            f"{speed / alone:.2f} of the encoder; peak memory {gigabytes(peak_memory())}"
        )


if __name__ == "__main__":
    main()
