"""A class or function with its arguments, as a config node names it."""

import functools
import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedssl.errors import InputError, RunError, error_of_path
from fedssl.plain_values import RUN_KEYS

T = TypeVar("T")


@dataclass(frozen=True)
class Component:
    """Class or function with its arguments, from a config node: ``_target_``, and plain values or nested nodes."""

    values: Mapping[str, Any]

    def __hash__(self) -> int:
        return hash(json.dumps(self.values, sort_keys=True))

    @property
    def target(self) -> str:
        """Return the dotted name."""
        return str(self.values["_target_"])

    @property
    def name(self) -> str:
        """Return the name of the class or function, without its module."""
        return self.target.rpartition(".")[2]

    def instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target with further arguments; `InputError` if it rejects its arguments."""
        try:
            return _instantiate(self.values, *args, **kwargs)
        except InputError:
            raise
        except Exception as error:
            causes = [error]
            while isinstance(causes[-1].__cause__, Exception):
                causes.append(causes[-1].__cause__)
            known = next((cause for cause in causes if isinstance(cause, InputError | RunError | MemoryError)), None)
            if known is not None:
                raise known from None
            if any(str(cause) == "can't start new thread" for cause in causes):
                raise RunError("no further thread can be started; raise the limit of the shell: ulimit -u") from error
            if isinstance(error, OSError) and (sentence := error_of_path(error)) is not None:
                raise sentence from error
            reason, frames = " ".join(str(error).split()), traceback.extract_tb(error.__traceback__)
            if isinstance(error, TypeError | ValueError):
                raise InputError(f"{self.target} rejects its settings: {reason}") from error
            place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}"
            raise InputError(f"{self.target} failed: {type(error).__name__}: {reason} ({place})") from error

    def make(self, kind: type[T], **arguments: Any) -> T:
        """Instantiate an object of a class; `InputError` for another object."""
        made = self.instantiate(**arguments)
        if isinstance(made, kind):
            return made
        raise InputError(
            f"{self.target} makes a {type(made).__name__}; return a {kind.__module__}.{kind.__name__} or a subclass"
        )


def _instantiate(node: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call the target of a node, and first those of its inner nodes, as Hydra does, which needs 2 ms for each."""
    from fedssl.config.targets import locate  # here: it needs Hydra

    inner = _value if node.get("_recursive_", True) else lambda value: value
    arguments = {key: inner(value) for key, value in node.items() if key not in RUN_KEYS}
    positional = args or [inner(value) for value in node.get("_args_", ())]
    call = functools.partial(locate(node["_target_"]), *positional, **arguments | kwargs)
    return call if node.get("_partial_") else call()


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(item) for item in value]
    if isinstance(value, dict):
        return _instantiate(value) if "_target_" in value else {key: _value(item) for key, item in value.items()}
    return value
