r"""Mean and standard deviation of the clients' images, measured before round 1 (``dataset.mean=federated``).

A sample of the clients sends sums of its images (`fedssl.statistics`). With secure aggregation the server receives only
their total. With ``privacy=central`` every client has the same weight, and the server adds noise to the sums of means
and means of squares, in [0, 1] for C channels and taken relative to 1/2, and to the number K of clients that reply,
since who replies is private, too; K itself is only in the run folder. A client with the vector (m, 1/2) changes (sum of
m, K / 2) by at most sqrt(2 C + 1) / 2, and the released means, relative to 1/2, are

$$
\frac{\sum_k m_k + n}{K + 2 n_0} \quad \text{with} \quad
(n, n_0) \sim \mathcal{N} \left( 0, \frac{z^2 (2 C + 1)}{4} I \right)
$$

which costs as much privacy as a round. The run has the numbers in its settings, and continues with them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from fedssl.availability import Availability, first_time_online
from fedssl.config.load import compose, with_values
from fedssl.config.overrides import to_text
from fedssl.config.statistics_settings import KEYS
from fedssl.errors import InputError, RunError, shortened
from fedssl.logs import log
from fedssl.safe_io import sanitize_line
from fedssl.secure_aggregation.protocol import MAX_CLIENTS
from fedssl.secure_aggregation.server import secure_mean_delta
from fedssl.seeding import numpy_generator
from fedssl.statistics.exchange import QUERY, exact_steps, make_plan, read_answer, read_mean
from fedssl.statistics.sums import DTYPES, PERCENTILES, ImageSums, num_limbs
from fedssl.wire.device import code_fingerprint
from fedssl.wire.messages import NO_REPLY, ClientUpdate
from server_app.build import RunComponents, build_components
from server_app.console import log_while_waiting
from server_app.messaging import ClientMessenger

MESSAGE_TYPE = f"query.{QUERY}"
_MAX_RELATIVE_NOISE = 1 / 3  # of a variance
_CONSTANT = 1e-6  # standard deviation of a constant channel, after rounding


@dataclass
class _Answers:
    """Sums of the clients that answered, and reasons of the others. ``centered`` sums their means relative to 1/2."""

    total: ImageSums
    centered: np.ndarray  # float64, (2, channels): of values and of their squares
    clients: int = 0  # with images
    dtypes: dict[int, str] = field(default_factory=dict)  # by client, unless only the total is known
    dropped: dict[int, str] = field(default_factory=dict)

    def add(self, client: int, sums: ImageSums, *, pixels: int) -> None:
        if not sums.images:
            self.dropped[client] = "has no images"
            return
        self.total += sums
        self.centered += np.stack(sums.moments(pixels=pixels)) - 0.5
        self.clients += 1
        self.dtypes[client] = DTYPES[sums.clients.index(1)]


def with_statistics(components: RunComponents, grid: Callable[[], Grid]) -> RunComponents:
    """Return the components of a run whose settings have the statistics of the clients' images, if it requests them.

    ``grid`` returns the grid of the clients. Raises `InputError` or `RunError` if the statistics are not usable.
    """
    settings = components.settings
    if not settings.statistics.are_missing:
        return components
    asked = sample(components)
    with log_while_waiting(f"{len(asked)} clients compute statistics of their images"):
        answers = ask(grid(), components, asked)
    log_answers(answers, asked=len(asked))
    if not answers.total.images:
        raise RunError("no client sent statistics of images; set dataset.mean and dataset.std to numbers")
    mean, std, measured = release(answers, components, asked=len(asked))
    numbers = [f"{key}={to_text(value)}" for key, value in zip(KEYS, (mean, std), strict=True)]
    log.info(
        "statistics of the images of %d of %d clients, %d of which were asked: %s",
        *(answers.clients, len(components.federation.available_clients(())), len(asked), " ".join(numbers)),
    )
    words = [word for word in settings.recording.overrides if word.partition("=")[0].lstrip("+") not in KEYS]
    statistics = {"max_clients": settings.statistics.max_clients, "measured": measured}
    resolved = with_values(compose([*words, *numbers]), {"statistics": statistics})
    log.disabled = True  # all was logged when the components were built before
    try:
        return build_components(replace(resolved, machine=settings.machine), components.federation.directory)
    finally:
        log.disabled = False


def sample(components: RunComponents) -> list[int]:
    """Draw the clients that are asked, ascending; of a simulation those that are online when enough are for a round.

    Clients that never train are not asked.
    """
    federation, settings = components.federation, components.settings
    clients = np.array(sorted(federation.available_clients(())), np.int64)
    limits = [settings.statistics.max_clients, MAX_CLIENTS if settings.secure_aggregation else None, len(clients)]
    number = min(limit for limit in limits if limit is not None)
    drawn = numpy_generator(settings.seed, "statistics", "clients").choice(clients, size=number, replace=False)
    if components.context.is_deployment:
        return sorted(drawn.tolist())
    availability: Availability = settings.availability.instantiate(num_clients=settings.num_clients, seed=settings.seed)
    times = {client: times for client in drawn.tolist() if (times := availability.online_times(client)) is not None}
    start = first_time_online(list(times.values()), 0.0, number=min(settings.aggregation.min_updates, len(times)))
    online = [client for client, each in times.items() if start is not None and each.online_until(start) is not None]
    if len(online) < number:
        log.info("%d of %d clients are online to send statistics of their images", len(online), number)
    return sorted(client for client in online if not availability.drops_out(client, 0, 0))


def ask(grid: Grid, components: RunComponents, clients: Sequence[int]) -> _Answers:
    """Ask clients for the sums of their images, and return what they sent; raises `RunError`."""
    settings, context, nodes = components.settings, components.context, components.federation.nodes
    data = settings.data
    text = context.client_config if context.is_deployment else settings.client_yaml
    content = make_plan(text, code_fingerprint=code_fingerprint()).to_content()
    deadline = settings.aggregation.round_deadline if context.is_deployment else None
    send = partial(ClientMessenger(grid).send_and_receive, timeout=settings.reply_timeout, deadline=deadline)
    client_of = {nodes[client]: client for client in clients}
    answers = _Answers(ImageSums.zero(data.channels), np.zeros((2, data.channels)))
    pixels = data.size**2
    if settings.secure_aggregation is not None:
        secure = exact_steps(settings.secure_aggregation)
        contents, length = dict.fromkeys(client_of, content), num_limbs(data.channels)
        result = secure_mean_delta(send, contents, secure, length=length, round=0, message_type=MESSAGE_TYPE)
        answers.dropped = {client_of[node]: reason for node, reason in result.dropped.items()}
        answers.total = read_mean(result.delta, clients=len(result.nodes), channels=data.channels)
        answers.clients = sum(answers.total.clients)
        if problem := answers.total.problem(pixels=pixels, clients=len(result.nodes)):
            raise RunError(
                f"a client {problem}, and secure aggregation hides which one; set dataset.mean and dataset.std to "
                "numbers"
            )
        return answers
    answers.dropped = dict.fromkeys(clients, NO_REPLY)
    for message, reply in send([Message(content, node, MESSAGE_TYPE, group_id="0") for node in client_of]):
        client = client_of[message.metadata.dst_node_id]
        try:
            if reply.has_error():
                raise ValueError(f"failed: {reply.error.reason}")
            sums = read_answer(ClientUpdate.from_content(reply.content, client), channels=data.channels)
            if problem := sums.problem(pixels=pixels) or _too_many(sums, settings.aggregation.max_examples):
                raise ValueError(problem)
        except Exception as error:  # whatever a peer may have put into a message
            answers.dropped[client] = sanitize_line(str(error) or type(error).__name__)
            continue
        del answers.dropped[client]
        answers.add(client, sums, pixels=pixels)
    return answers


def _too_many(sums: ImageSums, max_examples: int | None) -> str:
    if max_examples is None or sums.images <= max_examples:
        return ""
    return f"reports {sums.images} images but aggregation.max_examples={max_examples}"


def log_answers(answers: _Answers, *, asked: int) -> None:
    """Log clients that are not in the statistics, and those whose images have another dtype than most clients'."""
    if answers.dropped:
        listed = shortened((f"client {client} {why}" for client, why in sorted(answers.dropped.items())), maximum=8)
        log.warning("%d of %d clients are not in the statistics: %s", len(answers.dropped), asked, listed)
    counts = dict(zip(DTYPES, answers.total.clients, strict=True))
    usual = max(counts, key=counts.__getitem__)
    if answers.clients > counts[usual]:
        others = [f"client {client} {dtype}" for client, dtype in sorted(answers.dtypes.items()) if dtype != usual]
        log.warning(
            "%d clients have %s images and %d have others (%s); values of each are scaled to [0, 1], so set "
            "dataset.window if they do not mean the same",
            *(
                counts[usual],
                usual,
                answers.clients - counts[usual],
                shortened(others, maximum=8) or "their names are hidden",
            ),
        )


def release(
    answers: _Answers, components: RunComponents, *, asked: int
) -> tuple[list[float], list[float], dict[str, Any]]:
    """Return mean, standard deviation, and what the run records of the statistics; raises `InputError`."""
    settings, total = components.settings, answers.total
    counts: dict[str, Any] = {"clients": answers.clients, "asked": asked}
    if settings.privacy is not None:
        deviation = settings.privacy.noise_multiplier * math.sqrt(2 * settings.data.channels + 1) / 2
        path = (settings.seed, "noise", "statistics")  # as in a round, see `strategies.mods.privacy`
        random = np.random.default_rng() if components.context.is_deployment else numpy_generator(*path)
        sums = answers.centered + random.normal(0.0, deviation, answers.centered.shape)
        clients = min(max(answers.clients + 2 * random.normal(0.0, deviation), 1.0), float(asked))
        first, second = sums / clients + 0.5
        noise = deviation / clients
        mean, variance = np.clip(first, 0, 1), second - first**2
        if (variance * _MAX_RELATIVE_NOISE < noise).any():
            raise InputError(
                f"the noise of privacy.noise_multiplier={settings.privacy.noise_multiplier:g} has a standard deviation "
                f"of {noise:.2g} in the means of {answers.clients} clients, which hides their variance; raise "
                "statistics.max_clients or num_clients, or set dataset.mean and dataset.std to numbers"
            )
        return mean.tolist(), np.sqrt(variance).tolist(), {**counts, "noise": noise}
    mean, std = total.mean_and_std(pixels=settings.data.size**2)
    if constant := [channel for channel, value in enumerate(std) if value < _CONSTANT]:
        log.warning("all images have the same value in channel %s, whose standard deviation is set to 1", constant)
        std = [1.0 if channel in constant else value for channel, value in enumerate(std)]  # as scikit-learn does
    dtypes = {dtype: number for dtype, number in zip(DTYPES, total.clients, strict=True) if number}
    values = {"lowest": total.percentile(0), "highest": total.percentile(100)}
    values |= {f"percentile_{percent}": total.percentile(percent) for percent in PERCENTILES}
    return mean, std, {**counts, "images": total.images, "clients_by_dtype": dtypes, **values}
