"""Evaluation on the server: the models of the run under the protocols that the settings name."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fedssl.config.settings import DataSettings, EvaluationSettings
from fedssl.encoders.base import Encoder
from fedssl.errors import InputError
from fedssl.evaluation.evaluation_input import EvaluationInput, LabeledImages, make_evaluation_input
from fedssl.evaluation.features import Features, accuracy, pixels
from fedssl.evaluation.protocol import DryRunStop, EvaluationProtocol, evaluate
from fedssl.evaluation.scores import Score, units_of
from fedssl.machine.memory import available_memory, gigabytes
from fedssl.methods.base import SSLMethod

ResultsByModel = dict[str, dict[str, Score]]  # results by the name of what was judged


class Evaluator:
    """Labeled images of the data set and the protocols of ``evaluation`` and ``final_evaluation``.

    Without labelled training and test images there is nothing to evaluate with: all results are empty.
    """

    def __init__(
        self, settings: EvaluationSettings, *, data: DataSettings, rounds: int, device: torch.device, seed: int
    ) -> None:
        self._data, self._device, self._seed = data, device, seed
        self._every, self._rounds = settings.every, rounds
        self._protocol: EvaluationProtocol = settings.protocol.instantiate()
        self._final_protocol: EvaluationProtocol = settings.final_protocol.instantiate()

    def dry_run(self, encoder: Encoder) -> dict[str, str] | None:
        """Find before any training a protocol that the labels do not allow, by a dry run.

        Protocols are run on features that say nothing, each one of several no further than to where a network computes,
        the encoder or a classifier that is trained: what they refuse they refuse before.

        Returns
        -------
        dict of str to str, or None
            Names and units of the results that rounds will have; None: only an evaluation tells.
        """
        evaluation_input = make_evaluation_input(encoder, self._data, device=self._device)
        if evaluation_input is None:
            return {}
        few = LabeledImages(evaluation_input.test.images[:2], evaluation_input.test.labels[:2])
        # At the end raw pixels are judged, too.
        longest = max(encoder.feature_dim, pixels(few.images).shape[1])
        ends: list[nn.Module] = []

        def stop_dry_run(network: nn.Module, inputs: Any) -> None:
            ends.append(network)
            raise DryRunStop

        end = register_module_forward_pre_hook(stop_dry_run)
        try:
            dry_run_input = _DryRunInput(**{**vars(evaluation_input), "test": few}, length=encoder.feature_dim)
            units = units_of(evaluate(self._protocol, dry_run_input, seed=self._seed))
            told = None if ends else units
            evaluate(self._final_protocol, replace(dry_run_input, length=longest), seed=self._seed)
        finally:
            end.remove()
        return told

    def due(self, round: int) -> bool:
        """Whether the encoder is evaluated after this round."""
        return self._every > 0 and (round % self._every == 0 or round == self._rounds)

    def evaluate(self, models: Iterable[tuple[str, SSLMethod]], *, final: bool = False) -> ResultsByModel:
        """Judge each model, by name, by the protocol for the rounds or the final one; they are used in turn."""
        protocol = self._final_protocol if final else self._protocol
        return {name: self._evaluate(protocol, model) for name, model in models}

    def baselines(self, untrained: SSLMethod) -> ResultsByModel:
        """What the final protocols, on the same draws, say of the untrained encoder and of raw pixels."""
        raw = make_evaluation_input(None, self._data, device=self._device)
        if raw is None:
            return {}
        return {"untrained": self._evaluate(self._final_protocol, untrained), "pixels": self.evaluate_final(raw)}

    def evaluation_input(self, method: SSLMethod) -> EvaluationInput | None:
        """The method's encoder and the images; None without labelled ones for training and test."""
        return make_evaluation_input(method.encoder, self._data, device=self._device)

    def evaluate_final(self, evaluation_input: EvaluationInput) -> dict[str, Score]:
        """What the final protocols say of a subject."""
        return evaluate(self._final_protocol, evaluation_input, seed=self._seed)

    def _evaluate(self, protocol: EvaluationProtocol, method: SSLMethod) -> dict[str, Score]:
        """Run the protocol on the encoder, and test a classifier of the method's own."""
        evaluation_input = self.evaluation_input(method)
        if evaluation_input is None:
            return {}
        results = evaluate(protocol, evaluation_input, seed=self._seed)
        if method.uses_labels:
            with torch.inference_mode():
                logits = method.classify(evaluation_input.features.test.to(self._device))
            if logits is not None:
                results["classifier"] = Score(accuracy(logits.argmax(dim=1), evaluation_input.test.labels))
        return results


@dataclass(frozen=True, eq=False, kw_only=True)
class _DryRunInput(EvaluationInput):
    """A subject whose features, which are to be of this length, cost nothing."""

    length: int

    @cached_property
    def features(self) -> Features:
        needed = 2 * 4 * self.length * len(self.train.labels)  # float32, once more where a protocol scales them
        free = available_memory()
        if free is not None and needed > free:
            raise InputError(
                f"{len(self.train.labels):,} training images with features of length {self.length} need "
                f"{gigabytes(needed)} of memory to be evaluated, and {gigabytes(free)} are available; name another "
                "split with dataset.splits.train=NAME, set dataset.limit, or choose evaluation=none and "
                "final_evaluation=none"
            )
        train, test = torch.zeros(len(self.train.labels), 1), torch.zeros(len(self.test.labels), 1)
        return Features(train, self.train.labels, test, self.test.labels, num_classes=self.num_classes)
