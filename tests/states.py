"""Client states, for tests of what strategies save."""

from pathlib import Path

from client_app.state_store import load_state
from strategies.types import ClientState


def load_tensors(folder: Path, *, before: int) -> ClientState | None:
    """Return the tensors of the state that a client loads in round ``before``."""
    stored = load_state(folder, before=before)
    return None if stored is None else stored.tensors
