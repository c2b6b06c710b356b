"""The strategies for Flower apps. Each computes what the class of this name in `strategies` does.

All have the further arguments of `strategies.flower.base.Options`, those of Flower's `FedAvg` among them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord

from fedssl.arrays import Layers
from fedssl.config.constraints import check_arguments
from fedssl.errors import InputError
from fedssl.schedule.phases import Phase, layer_wise, phase_at
from fedssl.schedule.stages import copy_stage
from strategies import eua, euc, fedavg, l_dawa, loss_weighted, m_dawa
from strategies.flower.arrays import as_parts, check_parts, in_parts
from strategies.flower.base import FlowerRule, Options
from strategies.flower.task import FEDEMA, FEDU, SCALE, ClientTask

Parts = str | Sequence[str]  # prefixes of names of arrays, up to a dot


class LDAWA(FlowerRule):
    """L-DAWA. Arguments as in `strategies.l_dawa.LDAWA`; ``weighting="loss"`` reads the metric ``loss_key``.

    ``scale_at="client"`` needs `client_mod`.
    """

    def __init__(
        self,
        *,
        weighting: str = "uniform",
        buffers: str = "average",
        warmup_rounds: int = 0,
        normalize: bool = False,
        scale_at: str = "server",
        loss_key: str = "train_loss",
        **options: Unpack[Options],
    ) -> None:
        rule = l_dawa.LDAWA(
            weighting=weighting,
            buffers=buffers,
            warmup_rounds=warmup_rounds,
            normalize=normalize,
            scale_at=scale_at,
        )
        at_client = scale_at == "client"
        task = ClientTask(rule=SCALE, buffers=buffers) if at_client else None
        super().__init__(rule.server, task=task, needs_mod=at_client, loss_key=loss_key, **options)
        self.warmup_rounds = warmup_rounds

    def task_in(self, round: int) -> ClientTask:
        return self.task if round > self.warmup_rounds else replace(self.task, rule="")


class MDAWA(FlowerRule):
    """M-DAWA. ``buffers`` as in `strategies.m_dawa.m_dawa`."""

    def __init__(self, *, buffers: str = "average", **options: Unpack[Options]) -> None:
        super().__init__(m_dawa.MDAWA(buffers=buffers).server, **options)


class LossWeighted(FlowerRule):
    """Averaging weighted by the clients' losses, which is the metric ``loss_key``."""

    def __init__(self, *, loss_key: str = "train_loss", **options: Unpack[Options]) -> None:
        super().__init__(loss_weighted.LossWeighted().server, loss_key=loss_key, **options)


class EUA(FlowerRule):
    """FedU2's aggregation. Arguments as in `strategies.eua.eua`."""

    def __init__(
        self, *, deviation: str = "log", step: str = "normalized", server_lr: float = 1.0, **options: Unpack[Options]
    ) -> None:
        super().__init__(eua.EUA(deviation=deviation, step=step, server_lr=server_lr).server, **options)


class EUC(FlowerRule):
    """FedLAMA. Arguments as in `strategies.euc.EUC`. Needs `client_mod`, which keeps layers that are not averaged."""

    def __init__(self, *, interval: int = 2, weighting: str = "uniform", **options: Unpack[Options]) -> None:
        check_arguments("strategy", interval=interval)
        super().__init__(euc.EUC(interval=interval, weighting=weighting).server, needs_mod=interval > 1, **options)


class FedU(FlowerRule):
    """FedU. Needs `client_mod`, which decides about the predictor (DAPU).

    ``encoder`` and ``predictor`` are prefixes of names; without a predictor, name the last part of the network. Name
    target networks in ``local``. Other arguments as in `strategies.fedu.FedUClient`.
    """

    def __init__(
        self,
        *,
        encoder: Parts,
        predictor: Parts,
        weighting: str = "examples",
        distance: str = "mean_conv_l2",
        predictor_threshold: float = 0.4,
        **options: Unpack[Options],
    ) -> None:
        check_arguments("strategy", distance=distance, predictor_threshold=predictor_threshold)
        task = ClientTask(
            rule=FEDU,
            encoder=as_parts(encoder),
            predictor=as_parts(predictor),
            distance=distance,
            predictor_threshold=predictor_threshold,
        )
        super().__init__(fedavg.FedAvg(weighting=weighting).server, task=task, needs_mod=True, **options)


class FedEMA(FlowerRule):
    """FedEMA. Needs `client_mod`, which mixes own and global weights.

    ``encoder`` and ``predictor``, which may be empty, are prefixes of names. Name target networks in ``local``. Other
    arguments as in `strategies.fedema.FedEMA`.
    """

    def __init__(
        self,
        *,
        encoder: Parts,
        predictor: Parts = (),
        weighting: str = "examples",
        tau: float = 0.7,
        distance: str = "mean_conv_l2",
        **options: Unpack[Options],
    ) -> None:
        check_arguments("strategy", distance=distance, tau=tau)
        task = ClientTask(
            rule=FEDEMA, encoder=as_parts(encoder), predictor=as_parts(predictor), distance=distance, tau=tau
        )
        super().__init__(fedavg.FedAvg(weighting=weighting).server, task=task, needs_mod=True, **options)


class LayerWise(FlowerRule):
    """FedAvg of one stage of the network after another (LW-FedSSL, `fedssl.schedule.phases.layer_wise`).

    A ClientApp reads the keys "num-stages" and "num-frozen-stages" of its config: it runs that many stages, and trains
    those of them that are not frozen. Arrays outside of the stages are always trained. With `client_mod`, clients send
    and receive only what changes.

    Parameters
    ----------
    stages : sequence
        One or several prefixes for each stage, from the input to the output.
    rounds : int
        Number of rounds, which are divided among the stages.
    rounds_per_stage : str or sequence of int
        "uniform", "left_skewed" (more for later stages), "right_skewed" or a number for each stage.
    weight_transfer : bool
        Whether a stage starts with the weights of the one before it, if their (last) prefixes have equal shapes.
    """

    def __init__(
        self,
        *,
        stages: Sequence[Parts],
        rounds: int,
        rounds_per_stage: str | Sequence[int] = "uniform",
        weight_transfer: bool = True,
        weighting: str = "examples",
        **options: Unpack[Options],
    ) -> None:
        if len(stages) < 2:
            raise InputError(f"LayerWise trains one stage after another and stages= has {len(stages)}; give 2 or more")
        self.stages = [as_parts(parts) for parts in stages]
        self.phases = layer_wise(
            rounds=rounds, depth=len(stages), rounds_per_stage=rounds_per_stage, weight_transfer=weight_transfer
        )
        self._phase: Phase | None = None  # of this round
        self._reached: Phase | None = None  # of the arrays that Flower has
        server = fedavg.FedAvg(weighting=weighting).server
        super().__init__(server, task=ClientTask(keeps_trained=False), **options)

    def begin_round(self, layers: Layers, round: int, config: ConfigRecord) -> tuple[Layers, list[str]]:
        check_parts(layers, stages=[part for parts in self.stages for part in parts])
        self._phase = phase = phase_at(self.phases, round)
        self._reached = self._reached or phase
        for later in self.phases[self._reached.number : phase.number]:
            if later.weight_transfer:
                old, new = (f"{self.stages[depth - 1][-1].rstrip('./')}." for depth in (later.depth - 1, later.depth))
                layers = {**layers, **(copy_stage(layers, old, new) or {})}
        config["num-stages"], config["num-frozen-stages"] = phase.depth, phase.frozen
        others = [part for parts in (*self.stages[: phase.frozen], *self.stages[phase.depth :]) for part in parts]
        layers, names = super().begin_round(layers, round, config)
        return layers, [name for name in names if not in_parts(name, others)]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is not None:  # else Flower keeps the arrays from before the transfer of weights
            self._reached = self._phase
        return arrays, metrics
