"""The client side of the strategies, for any ClientApp: ``ClientApp(mods=[client_mod])``.

The strategy sends its settings with the arrays, so that both sides agree, and the mod acts before and after training:

- FedU: the own predictor replaces the global one if the encoder changed much in the last training (DAPU);
- FedEMA: training starts from a mixture of own and global weights;
- L-DAWA with ``scale_at="client"``: the layers to upload are multiplied by their cosines;
- EUC, LayerWise, and ``local`` arrays: what is not exchanged stays on the client.

The state is in Flower's ``Context.state``, which lasts for a run. It is saved if the arrays of the reply are finite. A
client without the state that the server relies on replies with an error, and receives the whole model the next time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedssl.arrays import GlobalLayers, Layers, is_weight
from fedssl.errors import InputError
from fedssl.flower_internals import error_reply
from strategies.encoder_divergence import divergence
from strategies.fedema import blend, next_scale, own_share
from strategies.flower.arrays import conform, in_parts, read_layers, write_layers
from strategies.flower.task import FEDEMA, FEDU, HINT, PROBLEM, REPLY, SCALE, ClientTask
from strategies.l_dawa import scale_layers

KEPT, NUMBERS, NAMES = "fedssl-kept", "fedssl-numbers", "fedssl-names"  # keys of `Context.state`
DISTANCE, LAMBDA = "distance", "lambda"  # of FedU and FedEMA, in NUMBERS

# Kernels of shortcuts are excluded as in the authors' code, and patch embeddings because they are no convolutions.
_NO_KERNELS = ("downsample", "patch_embed", "conv_proj")


@dataclass(frozen=True)
class _Kept:
    """State of a client: arrays, numbers, and the names of all arrays in order."""

    layers: Layers
    numbers: dict[str, float]
    names: tuple[str, ...]


def client_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Apply the strategy's settings before and after training; a mod of Flower. Other strategies are unchanged."""
    task = ClientTask.read(message.content)
    if task is None:
        return call_next(message, context)
    if len(message.content.array_records) != 1:
        return error_reply(message, "client_mod needs a message with one ArrayRecord")
    ((key, record),) = message.content.array_records.items()
    received, kept = read_layers(record, task.statistics), _load(context.state, task)
    is_training = message.metadata.message_type.partition(".")[0] == "train"
    start = _start(task, received, kept) if is_training else received | _select(kept.layers, task.local)
    if start is None:
        return error_reply(message, "the client has not kept the arrays that the server did not send")
    # Within a process all clients of a round receive the same content, which must not change.
    message.content = RecordDict({**message.content, key: write_layers(start)})
    reply = call_next(message, context)
    if not is_training or reply.has_error() or len(reply.content.array_records) != 1:
        return reply
    ((key, record),) = reply.content.array_records.items()
    replied = _select(start, task.local)  # they may be left out
    try:
        replied |= read_layers(record, task.statistics)
        trained = conform(replied, GlobalLayers(start))
    except InputError as problem:  # also of arrays that are not uploaded; the server logs it
        hint = "" if replied.keys() >= start.keys() else HINT
        reply.content = RecordDict({**reply.content, REPLY: ConfigRecord({PROBLEM: f"{problem}{hint}"})})
        return reply
    if all(np.isfinite(array).all() for array in trained.values()):  # else the client keeps its previous state
        _save(context.state, _kept_after(task, received, start=start, trained=trained, numbers=kept.numbers))
    upload = write_layers(_upload(task, received, trained))
    reply.content = RecordDict({**reply.content, key: upload, REPLY: ConfigRecord()})
    return reply


def _start(task: ClientTask, received: Layers, kept: _Kept) -> Layers | None:
    """Return the arrays from which training starts; None if some were neither received nor kept."""
    names = tuple(received) if len(received) == task.num_arrays else kept.names
    layers = kept.layers | received
    if task.rule == FEDEMA:
        layers = blend(received, kept.layers, mu=own_share(kept.numbers.get(LAMBDA), kept.numbers.get(DISTANCE, 0.0)))
    layers |= _select(kept.layers, task.local)
    if task.rule == FEDU:
        layers |= _select(kept.layers, task.predictor)
    return {name: layers[name] for name in names} if names and layers.keys() >= set(names) else None


def _kept_after(
    task: ClientTask, received: Layers, *, start: Layers, trained: Layers, numbers: dict[str, float]
) -> _Kept:
    """Return the state to save after training."""
    own = _select(trained, task.local)
    if task.upload is not None:
        values = trained if task.keeps_trained else start
        own = {name: values[name] for name in trained if name not in task.upload} | own
    new: dict[str, float] = {}
    if task.rule == FEDU:
        new[DISTANCE] = _distance(task, trained, received)
        if not new[DISTANCE] < task.predictor_threshold:  # Eq. 3
            own |= _select(trained, task.predictor)
    if task.rule == FEDEMA:
        own |= {name: array for name, array in trained.items() if is_weight(name, array)}
        own |= _select(trained, task.predictor)
        new[DISTANCE] = _distance(task, trained, start)
        scale = next_scale(numbers.get(LAMBDA), new[DISTANCE], tau=task.tau)
        new |= {} if scale is None else {LAMBDA: scale}
    return _Kept(own, new, tuple(trained))


def _distance(task: ClientTask, trained: Layers, start: Layers) -> float:
    """Return the distance of `strategies.encoder_divergence` over the weights of the encoder that training changed.

    Local arrays have no global values.
    """
    encoder = {name: array for name, array in _select(trained, task.encoder).items() if not in_parts(name, task.local)}
    weights = {
        name: array
        for name, array in encoder.items()
        if is_weight(name, array) and not np.array_equal(array, start[name])
    }
    if task.distance == "mean_conv_l2":
        kernels = [name for name, array in weights.items() if array.ndim == 4]
        kernels = [name for name in kernels if not any(part in name for part in _NO_KERNELS)]
        weights = {name: weights[name] for name in kernels} or weights
    return divergence(GlobalLayers(weights), start, distance=task.distance) if weights else 0.0


def _upload(task: ClientTask, received: Layers, trained: Layers) -> Layers:
    layers = {name: trained[name] for name in (trained if task.upload is None else task.upload)}
    if task.rule == SCALE:
        return scale_layers({name: received[name] for name in layers}, layers, buffers=task.buffers)
    return layers


def _select(layers: Layers, parts: tuple[str, ...]) -> Layers:
    return {name: array for name, array in layers.items() if in_parts(name, parts)}


def _load(state: RecordDict, task: ClientTask) -> _Kept:
    if KEPT not in state:
        return _Kept({}, {}, ())
    numbers = {name: float(str(value)) for name, value in state.metric_records[NUMBERS].items()}
    names = str(state.config_records[NAMES]["names"]).split("\n")
    return _Kept(read_layers(state.array_records[KEPT], task.statistics), numbers, tuple(names))


def _save(state: RecordDict, kept: _Kept) -> None:
    state[KEPT] = write_layers(kept.layers)
    state[NUMBERS] = MetricRecord(dict(kept.numbers))
    state[NAMES] = ConfigRecord({"names": "\n".join(kept.names)})
