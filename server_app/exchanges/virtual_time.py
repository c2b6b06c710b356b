"""Virtual time in simulations: a clock, the time at which every reply arrives, and clients that are lost.

A client that gets a message at virtual time T ends at T + t, with t from `fedssl.availability.client_seconds`. It is
lost if it goes offline before that, or if it drops out: then its reply is lost at T + t. The server stops waiting for a
client when it is lost. Only clients whose replies arrive in time run, so that engines and their order of replies do not
matter. A client that is lost, or that does not arrive before the deadline or among the first, aborts: its state remains
that of its last participation.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from fedssl.availability import (
    Always,
    Availability,
    ClientSpeed,
    OnlineTimes,
    Workload,
    client_seconds,
    first_time_online,
)
from fedssl.config.settings import Settings
from fedssl.errors import RunError
from fedssl.flower_internals import content_from_bytes, content_to_bytes
from fedssl.logs import log
from fedssl.rules import Problem
from fedssl.seeding import numpy_generator
from fedssl.wire.messages import CONFIG, NO_REPLY
from fedssl.wire.records import restored_content
from server_app.exchanges.base import Lost, Received, SentRound, in_client_order
from server_app.exchanges.wall_clock import WallClockExchange
from server_app.messaging import replies_of
from server_app.updates import RoundResult
from strategies.rules import RunParts
from strategies.run_context import RunContext

OFFLINE = "it went offline before its reply"
DROPPED_OUT = "its reply was lost (availability.dropout)"
FIRST_NODE_ID = 2  # id of the first client's node on the engines local and ray


@dataclass(frozen=True, kw_only=True)
class VirtualTime:
    """Model of virtual time.

    ``client_time`` returns the time of a client's round. With ``is_in_seconds`` it is recorded; otherwise its unit has
    no meaning. With ``keeps_late`` clients whose replies do not arrive in a round continue in the next one.
    """

    availability: Availability
    client_time: Callable[[Workload], float]
    num_clients: int
    is_in_seconds: bool
    keeps_late: bool


def sample_delay(work: Workload, *, sigma: float, seed: int) -> float:
    """Return a log-normal delay without unit: exp(sigma (u + v) / sqrt(2)), with u of the client and v of its round.

    u and v are from a standard normal distribution, so that some clients are always slow.
    """
    node = work.client + FIRST_NODE_ID
    draws = (numpy_generator(seed, "delay", *path).standard_normal() for path in ((node,), (node, work.round)))
    return math.exp(sigma * sum(draws) / math.sqrt(2))


def make_virtual_time(context: RunContext) -> VirtualTime | None:
    """Return the model of virtual time, None for wall-clock time."""
    settings, seed = context.settings, context.settings.seed
    speed, buffered = _speed(settings), settings.aggregation.buffered
    if context.is_deployment or (speed is None and not _uses_first_replies(settings)):
        return None

    def client_time(work: Workload) -> float:
        if speed is None:
            return sample_delay(work, sigma=settings.aggregation.delay_sigma, seed=seed)
        return client_seconds(work, speed.speed(work.client, work.round))

    return VirtualTime(
        availability=_availability(settings),
        client_time=client_time,
        num_clients=settings.num_clients,
        is_in_seconds=speed is not None,
        keeps_late=buffered,
    )


def _uses_first_replies(settings: Settings) -> str:
    """Return the setting by which a round uses the first replies; empty if there is none.

    Simulated clients run in the order of their ids, so without delays the same ones would always be first.
    """
    aggregation = settings.aggregation
    if aggregation.over_selection:
        return f"aggregation.over_selection={aggregation.over_selection}"
    return "aggregation.buffered=true" if aggregation.buffered else ""


def warn_of_wall_clock_deadline(settings: Settings) -> None:
    """Warn that a deadline in wall-clock time always ends the rounds of a simulation without the same clients."""
    if settings.aggregation.round_deadline is not None:
        log.warning(
            "aggregation.round_deadline=%g is in wall-clock seconds, and simulated clients run in the order of their "
            "ids: if a round takes longer, those with the highest ids never count; set "
            "aggregation.round_deadline=null, or client_speed=lognormal for a deadline in virtual time",
            settings.aggregation.round_deadline,
        )


def _speed(settings: Settings) -> ClientSpeed | None:
    speed: ClientSpeed | None = settings.client_speed.instantiate(num_clients=settings.num_clients, seed=settings.seed)
    return speed


def _availability(settings: Settings) -> Availability:
    availability: Availability = settings.availability.instantiate(num_clients=settings.num_clients, seed=settings.seed)
    return availability


def time_fits_the_clients(parts: RunParts) -> Problem:
    """Refuse virtual time of devices, which have their own, and what needs virtual time without it."""
    settings, aggregation = parts.settings, parts.settings.aggregation
    choices = {group: f"{group}={settings.recording.choices.get(group)}" for group in ("client_speed", "availability")}
    if parts.context.is_deployment:
        others = [choice for choice in choices.values() if choice not in ("client_speed=none", "availability=always")]
        if not others:
            return None
        return (
            f"{others[0]} is for simulations: devices have their own speed and come and go; set client_speed=none "
            "availability=always"
        )
    if _speed(settings) is not None:
        if settings.evaluation.measure_resources:
            return None
        return (
            f"{choices['client_speed']} computes the time of a client from the FLOPs of its training; set "
            "measure_resources=true, or client_speed=none"
        )
    if not isinstance(_availability(settings), Always):
        return f"{choices['availability']} needs virtual time; set client_speed=lognormal, or availability=always"
    if aggregation.round_deadline is not None and (setting := _uses_first_replies(settings)):
        return (
            f"aggregation.round_deadline={aggregation.round_deadline:g} is in seconds of devices, but with {setting} "
            "simulated clients have virtual delays without unit; set client_speed=lognormal, or set "
            "aggregation.round_deadline=null"
        )
    return None


RUN_RULES = (time_fits_the_clients,)


@dataclass(frozen=True)
class _InFlight:
    """A message to a client: when it ends, its virtual seconds, and why its reply is lost (empty: it arrives)."""

    client: int
    end: float
    seconds: float
    reason: str
    message: Message


class VirtualTimeExchange(WallClockExchange):
    """Exchange in virtual time. Updates are not summed: which clients of a block arrive is not known before.

    An exchange ends when every message has ended, at the deadline, or with ``min_replies`` replies, which are those
    with the earliest arrival times. ``deadline`` is in virtual seconds, ``timeout`` in those of the wall clock.
    """

    without = "client_speed=none"

    def __init__(self, grid: Grid, model: VirtualTime) -> None:
        super().__init__(grid, keep_contents=True)
        self._model = model
        self._clock = self._recorded = 0.0  # now, and at the end of the last recorded round
        self._held: dict[int, _InFlight] = {}  # by node
        self._lost: dict[int, str] = {}  # why messages that ended during the newest round have no reply, by node
        self._seconds: dict[int, float] = {}  # virtual seconds of clients that replied, by node
        self._clients: Mapping[int, int] = {}  # of the newest round, by node
        self._attempt = (0, 0)  # round and attempt of the last messages
        self._has_warned = False
        times = {client: model.availability.online_times(client) for client in range(model.num_clients)}
        self._online: dict[int, OnlineTimes] = {
            client: online for client, online in times.items() if online is not None
        }

    def in_flight(self, *, timeout: float) -> set[int]:
        return set(self._held)

    def offline(self, clients: Callable[[], Collection[int]], *, needed: int, wanted: int) -> frozenset[int]:
        """Advance the clock until ``needed`` of the clients are online; return those that are offline.

        Log a warning, once, if fewer than ``wanted`` are online. Raises `RunError` if there are never enough.
        """
        if not self._model.is_in_seconds:
            return frozenset()
        sampled = clients()
        times = {client: self._online[client] for client in sampled if client in self._online}
        time = first_time_online(list(times.values()), self._clock, number=needed)
        if time is None:
            raise RunError(
                f"after virtual time {self._clock:g} s, {needed} of {len(sampled)} clients are never online together, "
                "but a round needs them (aggregation.min_updates); lower it, or change the settings of availability"
            )
        if time > self._clock:
            log.info("virtual time passes from %g s to %g s, until enough clients are online", self._clock, time)
            self._clock = time
        online = {client for client, online_times in times.items() if online_times.online_until(time) is not None}
        if len(online) < wanted and not self._has_warned:
            self._has_warned = True
            log.warning(
                "a round samples %d clients, of which %d are online: it samples these (logged once)",
                *(wanted, len(online)),
            )
        return frozenset(sampled) - online

    def replies(self, sent: SentRound) -> Iterator[Received]:
        self.late_replies.clear()
        self._start(sent)
        late: list[tuple[Message, Message]] = []
        nodes = {client: node for node, client in sent.nodes.items()}

        def is_lost(client: int) -> bool:
            return not self._model.keeps_late and nodes[client] not in self._lost

        yield from in_client_order(replies_of(self._arriving(sent, late)), sent, is_lost=is_lost)
        self.late_replies.extend(late)
        yield from self.late()
        for node, reason in self._lost.items():
            yield Lost(sent.clients[node], reason)

    def _arriving(self, sent: SentRound, late: list[tuple[Message, Message]]) -> Iterator[tuple[Message, Message]]:
        """Yield messages with their replies, and add those to earlier messages to ``late``."""
        deadline, min_replies = sent.policy.deadline, sent.policy.min_replies
        until, earlier = math.inf if deadline is None else self._clock + deadline, set(self._held) - set(sent.nodes)
        good, needed = 0, math.inf if min_replies is None else min_replies
        while good < needed and (batch := self._take_arriving(until, number=needed - good)):
            missing = {message.metadata.dst_node_id for message in batch}
            for message, reply in self.send_and_receive(batch, timeout=sent.timeout):
                good += not reply.has_error()
                missing.discard(message.metadata.dst_node_id)
                if message.metadata.dst_node_id in earlier:
                    late.append((message, reply))
                else:
                    yield message, reply
            self.pending.clear()
            self._lost.update(dict.fromkeys(missing, NO_REPLY))
        if good < needed and self._held:
            self._clock = until
        if not self._model.keeps_late:
            self._held.clear()

    def _start(self, sent: SentRound) -> None:
        self._lost.clear()
        self._seconds.clear()
        self._clients = sent.clients
        workloads = sent.workloads()
        for message in sent.messages:
            node, work = message.metadata.dst_node_id, workloads[message.metadata.dst_node_id]
            if work.round != self._attempt[0]:
                self._attempt = work.round, 0
            seconds = self._model.client_time(work)
            end, reason = self._clock + seconds, ""
            online_until = self._online[work.client].online_until(self._clock)
            assert online_until is not None  # others are not sampled
            if online_until < end:
                end, reason = online_until, OFFLINE
            elif self._model.availability.drops_out(work.client, *self._attempt):
                reason = DROPPED_OUT
            self._held[node] = _InFlight(work.client, end, seconds, reason, message)
        self._attempt = self._attempt[0], self._attempt[1] + 1

    def record(self, result: RoundResult) -> RoundResult:
        """Return the result with the virtual time of the round and its clients.

        It includes failed attempts and waiting.
        """
        if not self._model.is_in_seconds:
            return result
        seconds = {self._clients[node]: seconds for node, seconds in self._seconds.items()}
        clients = [replace(row, virtual_seconds=seconds[row.client]) for row in result.clients]
        result.measured.update(virtual_seconds=self._clock - self._recorded, virtual_time=self._clock)
        self._recorded = self._clock
        return replace(result, clients=clients)

    def _take_arriving(self, until: float, *, number: float) -> list[Message]:
        """Return the messages whose replies arrive first, at most ``number`` and none after ``until``.

        The clock advances to the last of them. Messages that are lost until then are removed.
        """
        arriving: list[Message] = []
        for node in sorted(self._held, key=lambda node: (self._held[node].end, self._held[node].client)):
            held = self._held[node]
            if held.end > until or len(arriving) >= number:
                break
            del self._held[node]
            self._clock = max(self._clock, held.end)
            if held.reason:
                self._lost[node] = held.reason
            else:
                self._seconds[node] = held.seconds
                arriving.append(held.message)
        return arriving

    def snapshot(self) -> dict[str, Any]:
        """Return the clock, and the messages in flight. Equal contents are saved once."""
        contents = {id(held.message.content): held.message.content for held in self._held.values()}
        index = {key: number for number, key in enumerate(contents)}
        return {
            "clock": self._clock,
            "messages": {
                str(node): {
                    "client": held.client,
                    "due": held.end,
                    "seconds": held.seconds,
                    "lost": held.reason,
                    "type": held.message.metadata.message_type,
                    "group": held.message.metadata.group_id,
                    "content": str(index[id(held.message.content)]),
                }
                for node, held in self._held.items()
            },
            "contents": {
                str(index[key]): np.frombuffer(content_to_bytes(content), np.uint8) for key, content in contents.items()
            },
        }

    def restore(self, saved: Mapping[str, Any], *, settings: str) -> None:
        if not saved:
            return
        serialized = {key: data.tobytes() for key, data in saved["contents"].items()}
        contents = {key: restored_content(content_from_bytes(data)) for key, data in serialized.items()}
        for content in contents.values():
            content.config_records[CONFIG]["settings"] = settings
        self._clock = self._recorded = saved["clock"]
        for node, entry in saved["messages"].items():
            message = Message(
                contents[entry["content"]], dst_node_id=int(node), message_type=entry["type"], group_id=entry["group"]
            )
            self._held[int(node)] = _InFlight(entry["client"], entry["due"], entry["seconds"], entry["lost"], message)
