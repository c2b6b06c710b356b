"""A round with the clients that are there, repeated while too few of them send what can be used."""

import logging
from collections.abc import Callable

from server_app.messaging import MessageExchange
from server_app.report import RoundResult
from server_app.round import Round, TooFewUpdatesError, UpdateObserver
from server_app.round_context import RoundContext
from strategies.state import ServerState

log = logging.getLogger("fedssl")


def run_round(
    exchange: MessageExchange,
    current_context: Callable[[], RoundContext],
    state: ServerState,
    *,
    keep_from: int = 0,
    observe: UpdateObserver | None = None,
) -> tuple[ServerState, RoundResult]:
    """The round after ``state``, from sampling to the new state.

    Parameters
    ----------
    exchange : MessageExchange
        Of the run.
    current_context : callable
        Gives the context with the clients that are there.
    state, keep_from, observe
        As in `Round` and `Round.end`.

    Raises
    ------
    TooFewUpdatesError
        The last repetition had too few, too.
    """
    attempt = 0
    while True:
        context = current_context()
        aggregation = context.aggregation
        exchange.expire(older_than=context.timeout)
        one = Round(context, state, keep_from=keep_from, attempt=attempt, in_flight=_in_flight(exchange, context))
        min_replies = aggregation.min_updates if aggregation.buffered else None
        if aggregation.over_selection:
            min_replies = context.clients_per_round
        replies = exchange.send_and_receive(
            one.messages, timeout=context.timeout, deadline=aggregation.round_deadline, min_replies=min_replies
        )
        try:
            if context.secure_aggregation:
                return one.finish_secure(exchange, context.secure_aggregation)
            return one.finish(replies, late_replies=exchange.late_replies, observe=observe)
        except TooFewUpdatesError as reason:
            if attempt == aggregation.max_retries:
                raise
            attempt += 1
            log.warning("%s; it is repeated with other clients (%d of %d)", reason, attempt, aggregation.max_retries)


def _in_flight(exchange: MessageExchange, context: RoundContext) -> set[int]:
    """Clients whose late updates will be used."""
    if not context.aggregation.buffered:
        return set()
    owing = {message.metadata.dst_node_id for message in exchange.pending.values()}
    return {client for client, node in context.nodes.items() if node in owing}
