r"""Client-level differential privacy of the global model, by a trusted server.

DP-FedAvg (McMahan et al., ICLR 2018, arXiv 1710.06963) with a fixed denominator: every update is clipped to a norm C,
and

$$
w = w_g + \frac{1}{K} \left( \sum_k (w_k - w_g) \min \left( 1, \frac{C}{\lVert w_k - w_g \rVert} \right)
+ \mathcal{N}(0, z^2 C^2 I) \right)
$$

with $w_g$ the old weights, and K the clients that train in a round, whether they reply or not. One client changes the
sum by at most C, so that a round is a Gaussian mechanism with noise multiplier z, and n rounds are one with z /
sqrt(n). Its epsilon is exact (Balle and Wang, ICML 2018, Theorem 8). Sampling of clients is not counted, because the
server may know the sample. Running statistics and counters are not released. They keep their values. After n rounds:

$$
\delta = \Phi \left( \frac{\mu}{2} - \frac{\varepsilon}{\mu} \right)
- e^{\varepsilon} \, \Phi \left( -\frac{\mu}{2} - \frac{\varepsilon}{\mu} \right) \qquad \mu = \frac{\sqrt{n}}{z}
$$
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedssl.arrays import Layers, is_weight
from fedssl.config.aggregation_settings import PrivacySettings
from fedssl.config.settings import Settings
from fedssl.logs import log
from fedssl.rules import Problem
from fedssl.seeding import numpy_generator
from fedssl.wire.messages import ClientUpdate
from strategies.mods.base import Mod, ModState
from strategies.round_start import StartingModel
from strategies.rules import RunParts, needs_full_exchange, rounds_to_repeat, sum_problem
from strategies.run_context import RunContext

GUARANTEE = "privacy"  # key of what it guarantees, in the lines of rounds and in the summary
_WEAK_EPSILON = 10


def contributions_stay_hidden(settings: Settings) -> Problem:
    """Refuse snapshots, which have the models of single clients, and the filter, by which clients influence others."""
    if settings.privacy and settings.recording.snapshot_every:
        return "privacy=central hides the contribution of a client, which snapshots reveal; set snapshot_every=0"
    if settings.privacy and settings.aggregation.max_norm_ratio is not None:
        return (
            "aggregation.max_norm_ratio lets clients influence which others are dropped, which privacy=central does "
            "not account for; set aggregation.max_norm_ratio=null"
        )
    return None


def updates_are_summed(parts: RunParts) -> Problem:
    """Require updates that are summed with equal weights, and no running statistics, which are not released."""
    if not parts.settings.privacy:
        return None
    if parts.strategy.server.has_server_step:
        name = parts.settings.recording.choices.get("strategy")
        return (
            f"privacy=central adds noise to the mean of the clients, which strategy={name} changes; set "
            "strategy=fedavg strategy.weighting=uniform"
        )
    encoder = parts.method.encoder
    updated = {name for name, _ in encoder.named_buffers()} - encoder.base_names
    problem = sum_problem("privacy=central", parts, weightings=("uniform",))
    if problem:
        return problem
    evaluated = set(parts.method.parts_in_eval_mode)
    if parts.strategy.client.evaluates_projector:
        evaluated |= {"projector"} & {*parts.method.regularized_parts}
    for name, part in parts.method.named_children():
        if name in evaluated and _has_statistics(buffer for buffer, _ in part.named_buffers()):
            return (
                f"privacy=central leaves running statistics out, which the {name} needs in eval mode; set "
                f"method.{name}.batch_norm=false method.{name}.last_batch_norm=false"
            )
    if not _has_statistics(updated):
        return None
    return (
        "privacy=central leaves running statistics out, which the encoder needs; set encoder.norm=group, "
        "encoder=vit_tiny, or a tuning with frozen statistics, such as tuning.freeze_statistics=true"
    )


def _has_statistics(names: Iterable[str]) -> bool:
    return any(name.endswith(("running_mean", "running_var")) for name in names)


def rounds_are_released_once(parts: RunParts) -> Problem:
    """Require a checkpoint of each round: a resumed run would release others anew, with uncounted noise, to devices."""
    repeated = rounds_to_repeat(parts)
    if not (parts.settings.privacy and repeated):
        return None
    return (
        f"privacy=central counts each round once, but with checkpoint_every={repeated + 1} a resumed run releases up "
        f"to {repeated} rounds to the devices again; set checkpoint_every=1"
    )


class Privacy(Mod):
    """Clips updates and adds noise to their mean.

    Parameters
    ----------
    clients : int
        K, the clients that train in a round.
    generator : callable
        Returns the generator of a round's noise. Predictable noise gives no privacy.
    earlier : int
        Releases with the same noise multiplier before round 1: statistics of the images.
    """

    sees_updates = True
    settings_rules = (contributions_stay_hidden,)
    run_rules = (updates_are_summed, rounds_are_released_once)
    round_rules = (needs_full_exchange("privacy=central"),)

    def __init__(
        self,
        settings: PrivacySettings,
        *,
        clients: int,
        generator: Callable[[int], np.random.Generator],
        earlier: int = 0,
    ) -> None:
        self._settings, self._clients, self._generator, self._earlier = settings, clients, generator, earlier

    @classmethod
    def make(cls, context: RunContext) -> "Privacy | None":
        """Return differential privacy, or None. In a simulation the noise depends on the seed, to be reproducible."""
        settings = context.settings
        if settings.privacy is None:
            return None
        earlier = 0 if settings.statistics.measured is None else 1
        warn_of_weak_privacy(settings.privacy, settings.rounds + earlier)

        def generator(round: int) -> np.random.Generator:
            return np.random.default_rng() if context.is_deployment else numpy_generator(settings.seed, "noise", round)

        return cls(settings.privacy, clients=context.clients_per_round, generator=generator, earlier=earlier)

    def contribute(self, update: ClientUpdate, start: StartingModel) -> ClientUpdate:
        return replace(update, layers=self.clip(update.layers, start.expected_upload.layers))

    def finish(
        self, layers: Layers, start: StartingModel, state: ModState, *, used: int, round: int
    ) -> tuple[Layers, ModState]:
        return self.add_noise(layers, start.expected_upload.layers, used=used, round=round), state

    def record(self, round: int, *, dropped: Collection[int]) -> Mapping[str, Any]:
        return {GUARANTEE: self.privacy_spent(round)}

    def clip(self, layers: Layers, start: Layers) -> Layers:
        """Clip the update to `clip_norm`; running statistics and counters keep their global values."""
        squares = (np.sum(np.square(layers[name] - start[name], dtype=np.float64)) for name in _weights(start))
        norm = math.sqrt(sum(squares))
        factor = min(1.0, self._settings.clip_norm / norm) if norm else 1.0
        clipped = {name: start[name] + (layers[name] - start[name]) * np.float32(factor) for name in _weights(start)}
        return {name: clipped.get(name, start[name]) for name in layers}

    def add_noise(self, mean: Layers, start: Layers, *, used: int, round: int) -> Layers:
        """Return the new global layers from the mean over the ``used`` updates of a round."""
        random = self._generator(round)
        std = self._settings.noise_multiplier * self._settings.clip_norm / self._clients
        share = np.float32(used / self._clients)
        released = dict(start)
        for name in _weights(start):
            noise = random.normal(0.0, std, start[name].shape)
            released[name] = (start[name] + share * (mean[name] - start[name]) + noise).astype(start[name].dtype)
        return {name: released[name] for name in mean}

    def privacy_spent(self, rounds: int) -> dict[str, float]:
        """Return epsilon after ``rounds`` rounds and what was released before, and its delta."""
        delta = self._settings.delta
        return {"epsilon": epsilon(rounds + self._earlier, self._settings.noise_multiplier, delta), "delta": delta}


def warn_of_weak_privacy(settings: PrivacySettings, rounds: int) -> None:
    """Log a warning if the epsilon of a whole run bounds nothing in practice."""
    spent = epsilon(rounds, settings.noise_multiplier, settings.delta)
    if spent > _WEAK_EPSILON:
        log.warning(
            "privacy.noise_multiplier=%g gives epsilon=%.3g after %d rounds, and above %g it proves little (Ponomareva "
            "et al., JAIR 2023); raise it, or lower rounds",
            *(settings.noise_multiplier, spent, rounds, _WEAK_EPSILON),
        )


def epsilon(rounds: int, noise_multiplier: float, delta: float) -> float:
    """Return the epsilon of ``rounds`` Gaussian mechanisms for a delta, to 1e-6."""
    if not rounds:
        return 0.0
    mu = math.sqrt(rounds) / noise_multiplier
    low, high = 0.0, 1.0
    while _delta(high, mu) > delta:
        high *= 2
    while high - low > 1e-6 * max(high, 1.0):
        middle = (low + high) / 2
        low, high = (middle, high) if _delta(middle, mu) > delta else (low, middle)
    return high


def _delta(epsilon: float, mu: float) -> float:
    """Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu)."""
    bounds = torch.tensor([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu], dtype=torch.float64)
    first, second = torch.special.log_ndtr(bounds).tolist()
    return math.exp(first) - math.exp(epsilon + second)


def _weights(layers: Layers) -> list[str]:
    return [name for name, array in layers.items() if is_weight(name, array)]
