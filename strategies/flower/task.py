"""The task of `client_mod` in a round: one value of the ConfigRecord that Flower sends with the arrays."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import ConfigRecord, RecordDict

TASK = "fedssl-task"  # key in the config
REPLY = "fedssl-client-mod"  # key of the ConfigRecord that the mod adds to a reply
HINT = "; name arrays that stay on the clients in local="
PROBLEM = "problem"  # key in it: why the mod cannot use the reply

FEDU, FEDEMA, SCALE = "fedu", "fedema", "l_dawa"


@dataclass(frozen=True, kw_only=True)
class ClientTask:
    """Instructions for `client_mod`. It keeps arrays that it does not upload until the client's next participation."""

    num_arrays: int = 0  # of the whole model; the message has fewer if the client has kept the others
    rule: str = ""  # FEDU, FEDEMA, SCALE, or none
    upload: tuple[str, ...] | None = None  # names of the arrays to upload; None: all
    # Whether arrays that are not uploaded keep the values after training, or those from before it (frozen stages).
    keeps_trained: bool = True
    local: tuple[str, ...] = ()  # prefixes of arrays that the server never uses
    statistics: tuple[str, ...] = ()  # names of further running statistics
    encoder: tuple[str, ...] = ()  # prefixes, for the distance
    predictor: tuple[str, ...] = ()  # prefixes
    distance: str = ""  # `strategies.encoder_divergence`
    predictor_threshold: float = 0.0
    tau: float = 0.0
    buffers: str = ""  # `strategies.l_dawa.scale_layers`

    def write(self, config: ConfigRecord) -> None:
        """Add the task to a config."""
        config[TASK] = json.dumps(asdict(self))

    @classmethod
    def read(cls, content: RecordDict) -> "ClientTask | None":
        """Read the task in a message; None if the strategy is another one."""
        texts = [record[TASK] for record in content.config_records.values() if TASK in record]
        if not texts:
            return None
        # JSON makes lists of tuples.
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in json.loads(str(texts[0])).items()
        }
        return cls(**values)
