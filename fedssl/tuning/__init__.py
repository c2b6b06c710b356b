"""Which parameters of the encoder are trained: functions named as in ``conf/tuning/``.

Each takes the new encoder and declares its other layers as base layers (`fedssl.encoders.base.Encoder.freeze_base`):
they are never trained, aggregated or part of an update, and a client receives them once (`fedssl.base_layers`).
"""

from fedssl.tuning.lora import lora, plain_copy
from fedssl.tuning.selection import adapter, bias, full, head_only, last_blocks, norm

__all__ = ["adapter", "bias", "full", "head_only", "last_blocks", "lora", "norm", "plain_copy"]
