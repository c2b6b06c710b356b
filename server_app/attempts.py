"""A round with the clients that are there, repeated while too few of them send what can be used."""

import logging
from collections.abc import Callable

from server_app.messaging import Post
from server_app.report import RoundReport
from server_app.round import Observe, Round, TooFewUpdatesError
from server_app.round_context import RoundContext
from strategies.state import ServerState

log = logging.getLogger("fedssl")


def run_round(
    post: Post,
    current_context: Callable[[], RoundContext],
    state: ServerState,
    *,
    keep_from: int = 0,
    observe: Observe | None = None,
) -> tuple[ServerState, RoundReport]:
    """The round after ``state``, from sampling to the new state.

    Parameters
    ----------
    post : Post
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
        updates = context.updates
        post.forget(older=context.timeout)
        one = Round(context, state, keep_from=keep_from, attempt=attempt, in_flight=_in_flight(post, context))
        enough = updates.min_updates if updates.buffered else None
        if updates.extra_clients:
            enough = context.clients_per_round
        replies = post.exchange(one.messages, timeout=context.timeout, deadline=updates.deadline, enough=enough)
        try:
            if context.secure:
                return one.end_with_sum(post, context.secure)
            return one.end(replies, late=post.late, observe=observe)
        except TooFewUpdatesError as reason:
            if attempt == updates.repeats:
                raise
            attempt += 1
            log.warning("%s; it is repeated with other clients (%d of %d)", reason, attempt, updates.repeats)


def _in_flight(post: Post, context: RoundContext) -> set[int]:
    """Clients whose late updates will be used."""
    if not context.updates.buffered:
        return set()
    owing = {message.metadata.dst_node_id for message in post.owed.values()}
    return {client for client, node in context.nodes.items() if node in owing}
