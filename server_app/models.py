"""The models of a state: their layers in the phase of its round, and the files of their encoders."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from fedssl.arrays import Layers
from fedssl.config.settings import Settings
from fedssl.datasets.raster import pixel_metadata
from fedssl.export import save_encoder
from fedssl.export.peft_adapter import merge_adapter
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import load_layers
from server_app.client_models import ClientModels, MappedValues
from strategies.run_context import RunContext
from strategies.types import GlobalModel, ServerState, model_suffix


def arrays_by_model(context: RunContext, state: ServerState) -> Mapping[str, Layers]:
    """Return the layers to evaluate of every model by name, in the phase of the state's round.

    Models of single clients are read whenever they are needed.
    """

    def layers(model: GlobalModel) -> Layers:
        return context.advance_to_phase(model, state.round).evaluated

    if isinstance(state.models, ClientModels):
        return MappedValues(state.models, layers)
    return {name: layers(state.models[name]) for name in state.model_names()}


def load_each(method: SSLMethod, models: Mapping[str, Layers]) -> Iterator[tuple[str, SSLMethod]]:
    """Yield each name with the method, into which the model of that name is loaded."""
    for name, layers in models.items():
        load_layers(method, layers)
        yield name, method


def export_encoders(
    folder: Path, method: SSLMethod, models: Mapping[str, Layers], settings: Settings, *, rounds: int
) -> dict[str, Path]:
    """Write the encoder of every model into the folder; return the files by name of the model.

    Factors are merged into its weights, and written alone as an adapter.
    """
    metadata = {
        "method": settings.model.method.name,
        "strategy": settings.algorithm.strategy.name,
        "dataset": settings.data.name,
        "rounds": rounds,
        "seed": settings.seed,
        **pixel_metadata(settings.data.reader.values),
    }
    files = {}
    for name, loaded in load_each(method, models):
        suffix = model_suffix(name)
        files[name] = folder / f"encoder{suffix}.pt"
        save_encoder(
            files[name],
            merge_adapter(loaded.encoder, folder / f"adapter{suffix}.safetensors"),
            settings=settings.model.encoder.values,
            mean=settings.data.mean,
            std=settings.data.std,
            metadata=metadata,
        )
    return files
