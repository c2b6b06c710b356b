"""Attempts at a round: it is repeated with other clients if it has too few usable updates."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from server_app.exchanges.base import Exchange, TooFewUpdatesError
from server_app.federation import Federation
from server_app.round import Round
from server_app.round_aggregation import UpdateObserver
from server_app.updates import RoundResult
from strategies.types import ServerState

log = logging.getLogger("fedssl")


def run_round(
    exchange: Exchange,
    current_federation: Callable[[], Federation],
    state: ServerState,
    *,
    oldest_resumable: int = 0,
    observers: Sequence[UpdateObserver] = (),
) -> tuple[ServerState, RoundResult]:
    """Run the round after ``state``, and repeat it with other clients if it has too few usable updates.

    ``current_federation`` returns the federation with the clients that are available. The last attempt raises
    `TooFewUpdatesError`.
    """
    attempt = 0
    while True:
        federation = current_federation()
        policy, awaited = federation.policy, exchange.in_flight(timeout=federation.settings.reply_timeout)
        in_flight = {federation.clients[node] for node in awaited if policy.rebase and node in federation.clients}
        offline = exchange.offline(
            partial(federation.available_clients, in_flight),
            needed=max(policy.min_updates - len(in_flight), 0),
            wanted=federation.num_wanted(in_flight),
        )
        attempted = Round(
            federation,
            state,
            oldest_resumable=oldest_resumable,
            attempt=attempt,
            in_flight=in_flight,
            offline=offline,
            observers=observers,
        )
        try:
            return attempted.run(exchange)
        except TooFewUpdatesError as reason:
            if attempt == policy.max_retries:
                raise
            attempt += 1
            log.warning("%s; it is repeated with other clients (%d of %d)", reason, attempt, policy.max_retries)
