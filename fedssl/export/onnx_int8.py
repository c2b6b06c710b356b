"""``precision=int8`` of ``format=onnx``: weights in a quarter of the bytes, and products of whole numbers.

Convolutions take inputs in 8 bits as well, whose ranges are those that images of the data set gave (static
quantization). In a vision transformer the inputs of matrix products are brought to 8 bits as they come (dynamic): with
fixed ranges ``vit_tiny`` was no faster than in fp32, and farther from it. By ONNX Runtime's
``onnxruntime.quantization``.
"""

import logging
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedssl.errors import InputError
from fedssl.export.formats import staging_folder, write_checked
from fedssl.export.onnx import IMAGES, run_onnx
from fedssl.export.source import ExportSource

CALIBRATION, MEASURED = 128, 256  # images that give the ranges, and others on which the result is compared
BATCH = 32  # of a timing
_TIMES = 7


@dataclass(frozen=True)
class QuantizedModel:
    """What int8 costs and saves, beside the same graph in fp32.

    Attributes
    ----------
    difference : float
        Of the graph in fp32 from our encoder, as `fedssl.export.formats.difference`.
    megabytes : tuple of float
        Of the files: fp32, int8.
    seconds : tuple of float
        For a batch of images on one thread, medians of timings in turn: fp32, int8.
    mean_cosine, least_cosine : float
        Between an image's representations in fp32 and int8, both less the mean representation in fp32.
    """

    difference: float
    megabytes: tuple[float, float]
    seconds: tuple[float, float]
    mean_cosine: float
    least_cosine: float


def export_int8(source: ExportSource, target: Path, images: Tensor) -> QuantizedModel:
    """Write the encoder as an ONNX graph in int8, from one in fp32 that was compared with ours.

    Parameters
    ----------
    target : Path
        The file, which is replaced; `fedssl.export.formats.check_target` has seen it.
    images : Tensor
        uint8 ``(n, channels, size, size)``, ``CALIBRATION + MEASURED`` of them.

    Raises
    ------
    InputError, RunError
        As of `fedssl.export.formats.export`.
    """
    with staging_folder(target) as folder:
        exact, small = folder / "fp32.onnx", folder / target.name
        difference = write_checked(source, "onnx", exact)
        quantize(exact, small, images[:-MEASURED], dynamic=source.encoder.patch_embedding is not None)
        found = compare(exact, small, images[-MEASURED:], difference=difference)
        small.replace(target)
    return found


def check_calibration_size(count: int) -> None:
    """Refuse, by an `InputError`, a data set with too few images."""
    if count < CALIBRATION + MEASURED:
        raise InputError(
            f"precision=int8 needs {CALIBRATION} images for the ranges of numbers and {MEASURED} others to compare "
            f"with fp32, and the data set has {count}; name a larger one with dataset=NAME"
        )


def quantize(exact: Path, small: Path, images: Tensor, *, dynamic: bool) -> None:
    """Write the graph of ``exact`` in int8 to ``small``.

    Parameters
    ----------
    images : Tensor
        uint8 ``(n, channels, size, size)``, which give the ranges; a dynamic one needs none.
    dynamic : bool
        Whether inputs are brought to 8 bits as they come, of matrix products only.
    """
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.batches: Iterator[Tensor] = iter(images.split(BATCH))

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.batches, None)
            return None if batch is None else {IMAGES: batch.numpy()}

    # Its advice to pre-process the graph, in which nothing is left to fuse, and lines on layers with one axis.
    logging.disable(logging.WARNING)
    try:
        if dynamic:
            quantization.quantize_dynamic(exact, small, op_types_to_quantize=["MatMul", "Gemm"], per_channel=True)
        else:  # unsigned inputs: the faster form on x86
            quantization.quantize_static(
                exact, small, Reader(), per_channel=True, activation_type=quantization.QuantType.QUInt8
            )
    finally:
        logging.disable(logging.NOTSET)


def compare(exact: Path, small: Path, images: Tensor, *, difference: float) -> QuantizedModel:
    """Compare two graphs of one encoder: sizes, speeds, and representations of images."""
    first, second = run_onnx(exact, images), run_onnx(small, images)
    mean = first.mean(dim=0)
    cosines = cosine_similarity(first - mean, second - mean)
    return QuantizedModel(
        difference=difference,
        megabytes=(exact.stat().st_size / 1e6, small.stat().st_size / 1e6),
        seconds=_times(exact, small, images[:BATCH]),
        mean_cosine=float(cosines.mean()),
        least_cosine=float(cosines.min()),
    )


def _times(exact: Path, small: Path, images: Tensor) -> tuple[float, float]:
    """Median seconds for the batch of each graph, on one thread and in turn."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    graphs = [
        onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"]) for file in (exact, small)
    ]
    feed = {IMAGES: images.numpy()}
    taken: list[list[float]] = [[], []]
    for attempt in range(_TIMES + 1):
        for graph, times in zip(graphs, taken, strict=True):
            start = time.perf_counter()
            graph.run(None, feed)
            if attempt:  # the first one warms up
                times.append(time.perf_counter() - start)
    return statistics.median(taken[0]), statistics.median(taken[1])
