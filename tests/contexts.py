"""Contexts of runs whose method, settings and clients a test chooses, without data sets."""

import functools
from dataclasses import replace

from fedssl.config.load import compose
from fedssl.config.settings import Settings
from fedssl.schedule.phases import end_to_end
from server_app.federation import Federation
from server_app.nodes import ClientDirectory
from server_app.policies import make_policy
from server_app.rules import round_rules
from strategies.mods import make_mods
from strategies.run_context import RunContext


@functools.cache
def default_settings() -> Settings:
    """The default settings, with seed 0, and without metrics for the log."""
    settings = compose(["seed=0", "rounds=1000"])
    return replace(settings, algorithm=replace(settings.algorithm, reported_metrics=()))


def run_context(method, *, is_deployment=False, phases=None, initial_layers=None, **settings):
    """The facts of a run of a method; ``settings`` are those of `Settings` that differ from the defaults."""
    changed = replace(default_settings(), **settings)
    return RunContext(
        settings=changed,
        method=method,
        phases=phases or end_to_end(rounds=changed.rounds, depth=0),
        clients_per_round=changed.clients_per_round,
        client_config="{}",
        is_deployment=is_deployment,
        initial_layers=initial_layers,
    )


def federation_of(grid, strategy, context, **fields):
    """All nodes of the grid as clients; ``fields`` are others of `Federation`."""
    directory = ClientDirectory(nodes=dict(enumerate(grid.get_node_ids())))
    fields.setdefault("policy", make_policy(context.settings.aggregation))
    fields.setdefault("round_rules", round_rules(context.settings, fields.setdefault("mods", make_mods(context))))
    return Federation(context=context, strategy=strategy, directory=directory, **fields)
