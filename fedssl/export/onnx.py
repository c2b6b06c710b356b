"""``format=onnx``: a graph in opset 18 that maps ``images``, as they are, to ``representations``.

``images`` are uint8 ``(batch, channels, size, size)`` with any batch; that they are standardised is in the graph.
What `ExportSource.metadata_dict` says is JSON under ``fedssl`` in the file's metadata.
"""

import json
import warnings
from pathlib import Path

import torch
from torch import Tensor

from fedssl.export.source import ExportSource
from fedssl.export.torch_formats import exported_program
from fedssl.export.weights import KEY

OPSET = 18
IMAGES, REPRESENTATIONS = "images", "representations"


def write_onnx(source: ExportSource, file: Path) -> None:
    """Write the graph and its weights into one file."""
    import onnx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own parts
        program = torch.onnx.export(
            exported_program(source),
            input_names=[IMAGES],
            output_names=[REPRESENTATIONS],
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None  # without a file to write
    model = program.model_proto
    onnx.helper.set_model_props(model, {KEY: json.dumps(source.metadata_dict())})
    onnx.save(model, file)


def run_onnx(file: Path, images: Tensor) -> Tensor:
    """Representations ``(batch, feature_dim)`` of images, by ONNX Runtime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run([REPRESENTATIONS], {IMAGES: images.numpy()})[0])
