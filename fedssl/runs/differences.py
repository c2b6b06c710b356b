"""In what the settings of a run differ from the defaults of this version."""

from typing import Any

from omegaconf import OmegaConf

from fedssl.config.compose import compose_nodes
from fedssl.config.overrides import groups
from fedssl.machine.threads import default_threads
from fedssl.runs.run import Run, iter_settings

_OWN = ("output_dir", "resume", "run_id")  # of every run its own
_ABSENT = "(none)"


def differences_from_defaults(run: Run) -> dict[str, tuple[Any, Any]]:
    """Tell the choices and values of a run that are not the defaults, each with the default.

    A value is compared with that of the choices that the run made: ``strategy=fedavg`` differs as a choice, and of its
    settings those that its file has otherwise. Choices that this version does not have, and experiments, which only set
    values, are compared with the default choice.
    """
    known = groups()
    _, usual = compose_nodes([])
    made = {group: name for group, name in run.choices.items() if name in known.get(group, ())}
    nodes, _ = compose_nodes([f"{group}={name}" for group, name in made.items() if group != "experiment"])
    found = {
        group: (name, usual.get(group, _ABSENT)) for group, name in run.choices.items() if name != usual.get(group)
    }
    settings = run.settings or {}
    plain: Any = OmegaConf.to_container(nodes)
    if not plain["threads"] and isinstance(plain["dataset"]["size"], int):
        plain["threads"] = default_threads(plain["dataset"]["size"])
    defaults, values = dict(iter_settings(plain)), dict(iter_settings(settings))
    for key in dict.fromkeys([*values, *defaults]) if settings else ():
        one, other = values.get(key, _ABSENT), defaults.get(key, _ABSENT)
        if one != other and key not in _OWN:
            found[key] = (one, other)
    return found
