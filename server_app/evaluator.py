"""Evaluation on the server: the models of a run by the protocols of the settings."""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from fedssl.config.settings import DataSettings, EvaluationSettings, Settings
from fedssl.encoders.base import Encoder
from fedssl.evaluation.features import accuracy, pixel_values
from fedssl.evaluation.protocol import (
    EvaluationInput,
    EvaluationProtocol,
    check_protocol,
    evaluate,
    evaluation_problem,
    log_unknown_classes,
    make_evaluation_input,
)
from fedssl.evaluation.scores import Score
from fedssl.machine.out_of_memory import module_on_cpu, retry_in_chunks
from fedssl.methods.base import SSLMethod
from fedssl.rules import Problem
from strategies.rules import RunParts

log = logging.getLogger("fedssl")

NO_SERVER_DATA = (
    "the server has no images, so collapse metrics and costs are not measured either; set a labeled data set of the "
    "server with dataset=NAME dataset.path=FOLDER"
)

ResultsByModel = dict[str, dict[str, Score]]  # results by model name


class Evaluator:
    """Evaluates models by the protocols of ``evaluation`` and ``final_evaluation``.

    Without labeled training and test images all results are empty.
    """

    def __init__(
        self, settings: EvaluationSettings, *, data: DataSettings, rounds: int, device: torch.device, seed: int
    ) -> None:
        self._data, self._device, self._seed = data, device, seed
        self._every, self._rounds = settings.every, rounds
        self._protocol = check_protocol(settings.protocol.instantiate())
        self._final_protocol = check_protocol(settings.final_protocol.instantiate())

    def validate(self, encoder: Encoder) -> None:
        """Refuse images that a protocol cannot use, before any training; raises `InputError`.

        Results that the images cannot give are logged.
        """
        evaluation_input = make_evaluation_input(encoder, self._data, device=self._device)
        if evaluation_input is None:
            return
        log_unknown_classes(evaluation_input)
        protocols = (self._protocol, self._final_protocol)
        left_out = {name: why for protocol in protocols for name, why in protocol.left_out(evaluation_input).items()}
        for name, why in left_out.items():
            log.warning("%s is left out: %s", name, why)
        self._protocol.validate(evaluation_input, feature_dim=encoder.feature_dim)
        # The final comparison includes raw pixels.
        longest = max(encoder.feature_dim, pixel_values(evaluation_input.test.images[:2]).shape[1])
        self._final_protocol.validate(evaluation_input, feature_dim=longest)

    def result_units(self, *, final: bool = False) -> dict[str, str]:
        """Return the units of the results of a round, or of the final ones, by name. Empty without labeled images."""
        protocol = self._final_protocol if final else self._protocol
        evaluation_input = make_evaluation_input(None, self._data, device=self._device)
        if evaluation_input is None:
            return {}
        units, left_out = protocol.result_units(evaluation_input.num_classes), protocol.left_out(evaluation_input)
        return {name: unit for name, unit in units.items() if name not in left_out}

    @property
    def trains_network(self) -> bool:
        return self._protocol.trains_network and evaluation_problem(self._data) is None

    def due(self, round: int) -> bool:
        return self._every > 0 and (round % self._every == 0 or round == self._rounds)

    def evaluate(self, models: Iterable[tuple[str, SSLMethod]], *, final: bool = False) -> ResultsByModel:
        """Evaluate each model, by the protocol of the rounds or the final one. ``models`` is iterated once."""
        protocol = self._final_protocol if final else self._protocol
        return {name: self._evaluate(protocol, model) for name, model in models}

    def baselines(self, untrained: SSLMethod) -> ResultsByModel:
        """Return the final results of the untrained encoder and of raw pixels, on the same draws."""
        raw = make_evaluation_input(None, self._data, device=self._device)
        if raw is None:
            return {}
        return {"untrained": self._evaluate(self._final_protocol, untrained), "pixels": self.evaluate_final(raw)}

    def evaluation_input(self, method: SSLMethod) -> EvaluationInput | None:
        """Return the method's encoder and the images; None without labeled images for training and test."""
        return make_evaluation_input(method.encoder, self._data, device=self._device)

    def evaluate_final(self, evaluation_input: EvaluationInput) -> dict[str, Score]:
        return evaluate(self._final_protocol, evaluation_input, seed=self._seed)

    def _evaluate(self, protocol: EvaluationProtocol, method: SSLMethod) -> dict[str, Score]:
        evaluation_input = self.evaluation_input(method)
        if evaluation_input is None:
            return {}
        results = evaluate(protocol, evaluation_input, seed=self._seed)
        if method.uses_labels:
            h = evaluation_input.features.test

            def classify(used: torch.device, chunk: int) -> Tensor | None:
                classifier = method if used == self._device else module_on_cpu(method)
                with torch.no_grad():
                    logits = [classifier.classify(part.to(used)) for part in h.split(chunk)]
                known = [part.cpu() for part in logits if part is not None]
                return torch.cat(known) if known else None

            logits = retry_in_chunks(classify, device=self._device, chunk=len(h), what="images are classified")
            if logits is not None:
                results["classifier"] = Score(accuracy(logits.argmax(dim=1), evaluation_input.test.labels))
        return results


def no_evaluation_reason(settings: Settings) -> str | None:
    """Return why nothing is evaluated; None if the server has labeled images."""
    return NO_SERVER_DATA if settings.data.federated is None else evaluation_problem(settings.data)


def personalized_models_have_labels(parts: RunParts) -> Problem:
    """Refuse to evaluate personalized models without labels."""
    if parts.context.is_deployment or not parts.settings.evaluation.personalized:
        return None
    problem = evaluation_problem(parts.settings.data)
    if problem is None and parts.has_labels():
        return None
    return f"evaluate_personalized=true needs labels; {problem or 'the images of the clients have none'}"


RUN_RULES = (personalized_models_have_labels,)
