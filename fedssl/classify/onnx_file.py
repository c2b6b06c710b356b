"""An encoder and a classifier as one ONNX graph, from the images of `fedssl.export.onnx` to probabilities.

The graph of the encoder is extended: it still has the output ``representations``, which is followed by
``probabilities``. Its metadata has the names of the classes as JSON under ``classes``.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fedssl.classify.classifier import Classifier
from fedssl.classify.options import Options
from fedssl.datasets.raster import convert
from fedssl.embedding import Embedder, onnx_backend
from fedssl.errors import InputError, RunError

TOLERANCE = 1e-4  # of probabilities; those of the graph are in fp32
NUM_CHECKED = 32  # images


def check_packages() -> None:
    """Raise an `InputError` if a package is missing."""
    missing = [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise InputError(
            f"onnx=FILE needs {' and '.join(missing)}; uv sync --extra export, or pip install 'fedssl[export]'"
        )


def write_onnx(options: Options, embedder: Embedder, classifier: Classifier, images: np.ndarray) -> float:
    """Write the file if its probabilities of some stored images are right; return their largest difference."""
    assert options.onnx is not None
    with TemporaryDirectory(dir=options.onnx.parent, prefix=".fedssl-classify-") as folder:
        encoder, staged = Path(folder, "encoder.onnx"), Path(folder, options.onnx.name)
        if options.backend == "onnx":
            encoder = onnx_backend.graph_file(options.source)
        else:
            _export(options, encoder)
        _append(encoder, classifier, staged)
        difference = _difference(staged, embedder, classifier, images)
        if not difference <= TOLERANCE:  # also NaN
            raise RunError(
                f"the ONNX graph gives probabilities that differ by {difference:.1e} (allowed: {TOLERANCE:.0e}); "
                "nothing was written, omit onnx= for the other results"
            )
        staged.replace(options.onnx)
    return difference


def _export(options: Options, file: Path) -> None:
    """Write the graph of the encoder, which is compared with the encoder."""
    from fedssl.config.commands import encoder_file  # these need torch
    from fedssl.config.targets import user_encoder
    from fedssl.export import saved_target
    from fedssl.export.formats import export
    from fedssl.export.source import ExportSource

    source = encoder_file(options.source)
    build = user_encoder(saved_target(source), options.folders)
    export(ExportSource.read(source, build=build), "onnx", file)


def _append(encoder: Path, classifier: Classifier, file: Path) -> None:
    """Write the graph of the file ``encoder`` with the classifier behind it to a new file."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    model = onnx.load(encoder)
    graph, features = model.graph, model.graph.output[0]
    value = features.name
    for operation, array in (
        ("Sub", classifier.center),
        ("MatMul", classifier.weight / classifier.temperature),
        ("Add", classifier.bias / classifier.temperature),
    ):
        graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), f"classifier_{operation}"))
        graph.node.append(helper.make_node(operation, [value, f"classifier_{operation}"], [f"classified_{operation}"]))
        value = f"classified_{operation}"
    graph.node.append(helper.make_node("Softmax", [value], ["probabilities"], axis=-1))
    shape = [features.type.tensor_type.shape.dim[0].dim_param, len(classifier.classes)]
    graph.output.append(helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, shape))
    known = {entry.key: entry.value for entry in model.metadata_props}
    helper.set_model_props(model, {**known, "classes": json.dumps(classifier.classes, ensure_ascii=False)})
    onnx.checker.check_model(model)
    onnx.save(model, file)


def _difference(file: Path, embedder: Embedder, classifier: Classifier, images: np.ndarray) -> float:
    """Return the largest difference of probabilities of images, which are reduced to 8 bits if the graph does so."""
    images = convert(images, "uint8") if embedder.pixels["window"] is None else images
    graph = onnx_backend.load(file, device="cpu", folders=())
    expected = classifier.probabilities(embedder(images))
    return float(np.abs(graph.outputs(images)[1] - expected).max())
