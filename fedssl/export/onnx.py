"""``format=onnx``: a graph in opset 18 that maps ``images`` to ``representations``, in fp32 or int8.

``images`` are `ExportSource.inputs` with any batch size, fitted as by `fedssl.datasets.geometry`; the graph includes
their scaling to [0, 1] and their standardization.
The file's metadata has `ExportSource.metadata_dict` as JSON under ``fedssl``, and the digest of the encoder's file.

With ``precision=int8`` weights need a quarter of the bytes. Convolutions have 8-bit inputs, too; their ranges are
calibrated on images of the data set (static quantization). In a vision transformer the inputs of matrix products are
quantized at run time (dynamic quantization): with fixed ranges ``vit_tiny`` was no faster than in fp32 and less
accurate. Quantization uses ``onnxruntime.quantization``.
"""

import json
import logging
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedssl.digests import file_identity
from fedssl.export.source import ExportSource, exported_program
from fedssl.export.weights import KEY

OPSET = 18
IMAGES, REPRESENTATIONS = "images", "representations"
CALIBRATION, MEASURED = 128, 256  # images for the ranges, and other images for the comparison
BATCH = 32  # images per timed run
_NUM_TIMINGS = 7


@dataclass(frozen=True)
class QuantizedModel:
    """Comparison of an int8 graph with the same graph in fp32; pairs are fp32 and int8."""

    difference: float  # of the fp32 graph from the encoder, see `fedssl.export.formats.difference`
    megabytes: tuple[float, float]  # file sizes
    seconds: tuple[float, float]  # median time per batch on one thread
    mean_cosine: float  # between an image's representations in both graphs, minus the mean representation in fp32
    min_cosine: float


def write_onnx(source: ExportSource, file: Path) -> None:
    """Write the graph and its weights into one file."""
    import onnx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the exporter itself
        program = torch.onnx.export(
            exported_program(source),
            input_names=[IMAGES],
            output_names=[REPRESENTATIONS],
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None  # None only if it writes a file
    model = program.model_proto
    about = source.metadata_dict() | {"digest": file_identity(source.file)}
    onnx.helper.set_model_props(model, {KEY: json.dumps(about)})
    onnx.save(model, file)


def run_onnx(file: Path, images: Tensor) -> Tensor:
    """Compute the representations ``(batch, feature_dim)`` of images by ONNX Runtime on the CPU."""
    session = _session(file)
    return torch.from_numpy(session.run([REPRESENTATIONS], {IMAGES: images.numpy()})[0])


def _session(file: Path, *, threads: int = 0) -> Any:
    """Return ONNX Runtime's session of a graph; without a number of threads it uses all cores."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Of bytes, since ONNX Runtime refuses paths that are not UTF-8.
    return onnxruntime.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])


def quantize(exact: Path, small: Path, images: Tensor, *, dynamic: bool) -> None:
    """Quantize the graph ``exact`` to int8 and write it to ``small``.

    Weights have 7 bits: sums of products of 8 bits saturate on x86 CPUs without VNNI instructions. ``dynamic``
    quantizes only matrix products, with inputs quantized at run time; otherwise ``images``, inputs of
    the graph, are for calibration.
    """
    import onnx
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.batches: Iterator[Tensor] = iter(images.split(BATCH))

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.batches, None)
            return None if batch is None else {IMAGES: batch.numpy()}

    model = onnx.load(exact)  # ONNX Runtime refuses paths that are not UTF-8
    # Hides the advice to pre-process the graph, which has nothing to fuse, and lines on layers with one axis.
    logging.disable(logging.WARNING)
    try:
        if dynamic:
            quantization.quantize_dynamic(
                model, small, op_types_to_quantize=["MatMul", "Gemm"], per_channel=True, reduce_range=True
            )
        else:  # unsigned inputs are faster on x86
            quantization.quantize_static(
                *(model, small, Reader()),
                per_channel=True,
                reduce_range=True,
                activation_type=quantization.QuantType.QUInt8,
            )
    finally:
        logging.disable(logging.NOTSET)


def compare(exact: Path, small: Path, images: Tensor, *, difference: float) -> QuantizedModel:
    """Compare the sizes, speeds and representations of two graphs of one encoder."""
    first, second = run_onnx(exact, images), run_onnx(small, images)
    mean = first.mean(dim=0)
    cosines = cosine_similarity(first - mean, second - mean)
    return QuantizedModel(
        difference=difference,
        megabytes=(exact.stat().st_size / 1e6, small.stat().st_size / 1e6),
        seconds=_times(exact, small, images[:BATCH]),
        mean_cosine=float(cosines.mean()),
        min_cosine=float(cosines.min()),
    )


def _times(exact: Path, small: Path, images: Tensor) -> tuple[float, float]:
    """Return each graph's median seconds per batch, measured alternately on one thread."""
    graphs = [_session(file, threads=1) for file in (exact, small)]
    feed = {IMAGES: images.numpy()}
    seconds: list[list[float]] = [[], []]
    for repetition in range(_NUM_TIMINGS + 1):
        for graph, times in zip(graphs, seconds, strict=True):
            start = time.perf_counter()
            graph.run(None, feed)
            if repetition:  # the first run is a warm-up
                times.append(time.perf_counter() - start)
    return statistics.median(seconds[0]), statistics.median(seconds[1])
