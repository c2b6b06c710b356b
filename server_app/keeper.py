"""What is kept of the models of a round where the run asks for it (``keep_models``)."""

from collections.abc import Collection, Mapping
from pathlib import Path

from fedssl.arrays import Layers
from fedssl.atomic_files import remove
from fedssl.runs.snapshots import round_folder, save_layers


class SnapshotWriter:
    """Writes models of one round after the other into a run folder.

    Parameters
    ----------
    folder : Path
        The run folder.
    round : int
    """

    def __init__(self, folder: Path, round: int) -> None:
        self._folder, self._round = folder, round

    def observe(self, client: int, layers: Layers) -> None:
        """Keep what a client sent."""
        save_layers(self._folder, self._round, f"client-{client}", layers)

    def finish(self, models: Mapping[str, Layers], *, used: Collection[int]) -> None:
        """Keep the server's models after the round; ``used`` are the clients whose updates went into them."""
        names = {f"client-{client}.pt" for client in used}
        for file in round_folder(self._folder, self._round).glob("client-*.pt"):
            if file.name not in names:  # of an attempt that failed
                remove(file)
        for name, layers in models.items():
            save_layers(self._folder, self._round, f"model-{name}", layers)
