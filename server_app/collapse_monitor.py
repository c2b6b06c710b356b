"""Collapse metrics in rounds of evaluation, of the global models and of every client's model as it arrives.

The representations are stored as well. They are drawn after the run (FedU2, Figs. 4 and 5).
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.arrays import Layers
from fedssl.config.settings import DataSettings
from fedssl.datasets.base import load_federated, load_split
from fedssl.datasets.images import ImageSource
from fedssl.evaluation.collapse_metrics import TOP, CollapseMetrics, spectrum
from fedssl.evaluation.features import extract
from fedssl.evaluation.scores import COLLAPSE_THRESHOLDS
from fedssl.logs import log
from fedssl.machine.out_of_memory import module_on_cpu, retry_in_chunks
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import exchanged_names, load_layers
from fedssl.runs.representations import Representations
from fedssl.seeding import torch_generator
from fedssl.training import Augment, method_inputs
from strategies.types import GLOBAL

Measurement = tuple[dict[str, Any], list[np.ndarray]]  # collapse metrics, and the unit vectors to store


def server_feature_extractor(
    method: SSLMethod, *, data: DataSettings, num_images: int, device: torch.device, seed: int
) -> Callable[[Layers], Tensor]:
    """Return a function that maps a model to features of at most ``num_images`` images of the split ``train``.

    The images are never test images. Features are float32 ``(num_images, feature_dim)``, on the CPU.
    """
    split = load_split(data, "train")
    assert split is not None  # validated by the strategy
    order = torch.randperm(len(split.images), generator=torch_generator(seed, "represent"))
    images = split.images.subset(order[:num_images])

    def extract_features(layers: Layers) -> Tensor:
        needed = [name for name in exchanged_names(method) if name.startswith("encoder.")]
        load_layers(method, {name: layers[name] for name in needed})
        return extract(method.encoder, images, mean=data.mean, std=data.std, device=device)

    return extract_features


@dataclass(frozen=True)
class CollapseReport:
    """Collapse metrics of the global models and then the clients' models of one round, and their representations.

    A row has the metrics by name, ``client`` (None for a global model), and ``model``, the name of a global model.
    ``failures`` are the messages of the method's failure modes that apply to the global models.
    """

    rows: list[dict[str, Any]]
    representations: Representations
    failures: tuple[str, ...] = ()


class CollapseMonitor:
    """Measures collapse metrics of models on the same images.

    Collapse metrics use images of the clients' split. Spectra and stored representations use test images, as in FedU2,
    or the clients' images if there are none. A spectrum uses two images per dimension, as far as available: with fewer
    images the representations would lack dimensions.
    """

    def __init__(
        self,
        method: SSLMethod,
        *,
        data: DataSettings,
        num_images: int,
        augment: Augment,
        device: torch.device,
        seed: int,
    ) -> None:
        self._method, self._device = method, device
        self._measured: dict[int, Measurement | None] = {}  # by client, since the last report; None: it has diverged
        self._mean, self._std = data.mean, data.std
        federated = load_federated(data)
        generator = torch_generator(seed, "diagnose")
        rows = torch.randperm(len(federated.images), generator=generator)[: max(num_images, method.min_batch_size)]
        self._training_images, self._augment, self._seed = federated.images[rows], augment, seed
        self._health = CollapseMetrics(
            federated.images,
            num_images=num_images,
            augment=augment,
            mean=data.mean,
            std=data.std,
            device=device,
            seed=seed,
        )
        held_out = load_split(data, "test")
        if held_out is None:
            log.info("the data set has no test images: spectra and representations use the clients' images")
        source, self._split = (federated, "federated") if held_out is None else (held_out, "test")
        order = torch.randperm(len(source.images), generator=torch_generator(seed, "shown"))
        self._images = source.images.subset(order[: max(num_images, 2 * method.encoder.feature_dim)])
        self._kept = min(num_images, len(self._images))
        self._labels = None if source.labels is None else source.labels[order[: self._kept]].numpy()
        # Stored are h, and z if it is on a sphere, which can be drawn directly.
        self._parts: tuple[str, ...] = ("encoder",)
        parts = dict(method.named_children())
        if "projector" in parts and parts["projector"].out_features == 3:
            self._parts = ("encoder", "projector")

    def observe(self, client: int, layers: Layers) -> None:
        """Measure a client's model, unless some of its layers are missing."""
        if layers.keys() >= self._needed():
            self._measured[client] = self._measure(layers)

    def finish(self, models: Mapping[str, Layers], *, used: Collection[int]) -> CollapseReport | None:
        """Measure the global models, and return them with the ``used`` clients since the last call.

        Return None if no global model is finite. Other clients are those of an attempt that was repeated.
        """
        observed = {client: measured for client, measured in self._measured.items() if client in used}
        clients = {client: measured for client, measured in observed.items() if measured is not None}
        self._measured = {}
        names = {name: "global model" if name == GLOBAL else f"model {name}" for name in models}
        measured = {name: self._measure(layers) for name, layers in models.items()}
        healthy = {name: measurement for name, measurement in measured.items() if measurement is not None}
        _warn_of_divergence(
            [*(f"client {client}" for client in observed if client not in clients)]
            + [f"the {names[name]}" for name in models if name not in healthy]
        )
        if not healthy:
            return None
        diagnostics = {name: self._diagnose(models[name]) for name in healthy}
        failures = [
            f"{names[name]}: {mode.describe(found)}"
            for name, found in diagnostics.items()
            for mode in self._method.failure_modes
            if mode.applies(found)
        ]
        rows = [
            {"client": None, "model": name, **numbers, **diagnostics[name]} for name, (numbers, _) in healthy.items()
        ]
        rows += [{"client": client, **numbers} for client, (numbers, _) in clients.items()]
        vectors = zip(*(vectors for _, vectors in (*healthy.values(), *clients.values())), strict=True)
        kept = [np.stack(part) for part in vectors]
        representations = Representations(
            names=np.array([*(names[name] for name in healthy), *(f"client {client}" for client in clients)]),
            globals=np.array(len(healthy)),
            h=kept[0],
            z=kept[1] if len(kept) > 1 else None,
            labels=self._labels,
        )
        return CollapseReport(rows, representations, tuple(failures))

    def _needed(self) -> set[str]:
        return {name for name in exchanged_names(self._method) if name.split(".")[0] in self._parts}

    def _diagnose(self, layers: Layers) -> dict[str, float]:
        method = self._method
        if not method.failure_modes:
            return {}
        load_layers(method, {name: layers[name] for name in exchanged_names(method)})
        method.start_round(first=True)
        method.eval()

        def diagnose(used: torch.device, _: int) -> dict[str, float]:
            network = method if used == self._device else module_on_cpu(method)
            generator = torch_generator(self._seed, "diagnose", "views")
            with torch.no_grad():
                views = self._augment(self._training_images.to(used), generator)
                return network.diagnose(method_inputs(network, views, None, generator))

        return retry_in_chunks(diagnose, device=self._device, what="failures are diagnosed")

    def _measure(self, layers: Layers) -> Measurement | None:
        """Measure one model; return None if a metric is not finite."""
        load_layers(self._method, {layer: layers[layer] for layer in self._needed()})
        representations = self._vectors()
        numbers: dict[str, Any] = {}
        if all(vectors.isfinite().all() for vectors in representations):
            # `CollapseMetrics` uses other images, whose spectrum may not exist.
            with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]  # missing in its `__all__`
                numbers = {**self._health.measure(self._method.encoder)}
        if not all(map(math.isfinite, numbers.values())) or not numbers:
            return None
        numbers["spectrum"] = {
            "singular_values": spectrum(representations[0])[:TOP].tolist(),
            "split": self._split,
            "images": len(representations[0]),
            "dim": representations[0].shape[1],
        }
        return numbers, [vectors[: self._kept].half().numpy() for vectors in representations]

    def _vectors(self) -> list[Tensor]:
        """Return unit vectors of the images: h, and z of the images that are stored."""
        maps: list[tuple[nn.Module, ImageSource]] = [(self._method.encoder, self._images)]
        if len(self._parts) > 1:
            both = nn.Sequential(self._method.encoder, self._method.get_submodule("projector"))
            maps.append((both, self._images.subset(torch.arange(self._kept))))
        features = [extract(part, images, mean=self._mean, std=self._std, device=self._device) for part, images in maps]
        return [F.normalize(vectors.double(), dim=1) for vectors in features]


def summarize_health(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return means over the global models and over the clients' models, and the spectrum of a single global model."""
    models = [row for row in measured if row["client"] is None]
    clients = [row for row in measured if row["client"] is not None]
    result = {"global": _means(models)}
    if len(models) == 1:
        result["global"]["spectrum"] = models[0]["spectrum"]
    return result | ({"clients": _means(clients)} if clients else {})


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    single = [key for key, value in rows[0].items() if isinstance(value, float)]
    return {key: mean(row[key] for row in rows) for key in single}


def warn_of_collapse(measured: Sequence[Mapping[str, Any]]) -> None:
    """Log a warning for models whose representation has collapsed, with the thresholds and what to change."""
    ill = [row for row in measured if any(row[name] < threshold for name, threshold in COLLAPSE_THRESHOLDS.items())]
    if ill:
        names = ", ".join(_name(row) for row in ill)
        worst = min(ill, key=lambda row: float(row["covariance_rank"]))
        values = [
            f"{name.replace('_', ' ')} {worst[name]:.3g}{f' (below {limit:g})' if worst[name] < limit else ''}"
            for name, limit in COLLAPSE_THRESHOLDS.items()
        ]
        log.warning(
            "the representation has collapsed in %s: %s; lower optimizer.lr, raise batch_size, or set another method",
            *(names, ", ".join(values)),
        )


def _name(row: Mapping[str, Any]) -> str:
    if row["client"] is not None:
        return f"client {row['client']}"
    return "the global model" if row["model"] == GLOBAL else f"model {row['model']}"


def _warn_of_divergence(models: Sequence[str]) -> None:
    if models:
        log.warning(
            "%s: representations are NaN or infinite, so the training has diverged; lower optimizer.lr",
            ", ".join(models),
        )
