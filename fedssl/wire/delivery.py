"""Delivery of an encoder to a device: its file and a signature of the server, and the quality that a device replies."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedssl.digests import identity

ENCODER = "encoder"
QUALITY = "quality"
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class EncoderDelivery:
    """An encoder file of a run."""

    run_id: str
    round: int
    model: str  # name of the model; "global" if there is only one
    content: bytes  # of the file, see `fedssl.export.load_encoder`
    signature: bytes = b""  # of `signed_text`; empty: not signed
    certificate: bytes = b""  # of the signing key, PEM

    @property
    def digest(self) -> str:
        return identity(self.content)

    @property
    def signed_text(self) -> bytes:
        """Return what the server signs: the digest and where the encoder comes from."""
        return f"fedssl encoder\n{self.run_id}\n{self.round}\n{self.model}\n{self.digest}\n".encode()

    def to_content(self) -> RecordDict:
        record = ConfigRecord(
            {
                "run-id": self.run_id,
                "round": self.round,
                "model": self.model,
                "digest": self.digest,
                "signature": self.signature,
                "certificate": self.certificate,
            }
        )
        file = Array(np.frombuffer(self.content, dtype=np.uint8))
        return RecordDict({ENCODER: ArrayRecord({ENCODER: file}), f"{ENCODER}-config": record})

    @classmethod
    def from_content(cls, content: RecordDict) -> "EncoderDelivery":
        """Read the message; raises `KeyError` or `ValueError` if it is invalid or its digest is wrong."""
        record = content.config_records[f"{ENCODER}-config"]
        file = content.array_records[ENCODER][ENCODER].numpy()
        if file.dtype != np.uint8 or file.ndim != 1:
            raise ValueError("the encoder is not a file")
        delivery = cls(
            run_id=_typed(record["run-id"], str),
            round=_typed(record["round"], int),
            model=_typed(record["model"], str),
            content=file.tobytes(),
            signature=_typed(record["signature"], bytes),
            certificate=_typed(record["certificate"], bytes),
        )
        if not 0 < delivery.round < 2**31:
            raise ValueError(f"round {delivery.round} does not exist")
        if delivery.digest != record["digest"]:
            raise ValueError("the digest of the encoder is wrong")
        return delivery


def quality_content(quality: Mapping[str, float]) -> RecordDict:
    """Return the content of a reply with the quality of the encoder on a device's images."""
    return RecordDict({QUALITY: MetricRecord(dict(quality))})


def read_quality(content: RecordDict, metrics: Iterable[str]) -> dict[str, float] | None:
    """Read a reply; None if the device does not share the quality. `KeyError` or `ValueError` if it is invalid."""
    record = content.metric_records.get(QUALITY)
    if record is None:
        return None
    quality = {name: _typed(record[name], float) for name in metrics}
    if not all(map(math.isfinite, quality.values())):
        raise ValueError("a metric is not finite")
    return quality


def _typed(value: object, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} instead of {kind.__name__}")
    return value
