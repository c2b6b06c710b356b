"""Evaluation on the server: the models of a run by the protocols of the settings."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedssl.config.settings import DataSettings, EvaluationSettings, Settings
from fedssl.datasets.holdout import NO_LABEL
from fedssl.encoders.base import Encoder
from fedssl.evaluation.features import accuracy, pixel_values
from fedssl.evaluation.protocol import (
    EvaluationInput,
    EvaluationProtocol,
    check_protocol,
    domain_result,
    evaluate,
    evaluate_domains,
    evaluation_problem,
    make_evaluation_input,
)
from fedssl.evaluation.scores import Score
from fedssl.logs import log
from fedssl.machine.out_of_memory import module_on_cpu, retry_in_chunks
from fedssl.methods.base import SSLMethod
from fedssl.rules import Problem
from strategies.rules import RunParts

NO_SERVER_DATA = (
    "the server has no images, so collapse metrics and costs are not measured either; set a labeled data set of the "
    "server with dataset=NAME dataset.path=FOLDER"
)

CLASSIFIER = "classifier"  # result of the classifier that a method with labels trains

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
        evaluated = [(protocol, self._input(protocol, encoder)) for protocol in (self._protocol, self._final_protocol)]
        reasons = [protocol.left_out(subject) for protocol, subject in evaluated if subject]
        for name, why in {name: why for part in reasons for name, why in part.items()}.items():
            log.warning("%s is left out: %s", name, why)
        for protocol, subject in evaluated:
            if subject is not None:
                # The final comparison includes raw pixels.
                pixels = pixel_values(subject.test.images[:2]).shape[1] if protocol is self._final_protocol else 0
                protocol.validate(subject, feature_dim=max(encoder.feature_dim, pixels))

    def result_units(self, *, final: bool = False) -> dict[str, str]:
        """Return the units of the results of a round, or of the final ones, by name. Empty without labeled images."""
        protocol = self._final_protocol if final else self._protocol
        evaluation_input = self._input(protocol, None)
        if evaluation_input is None:
            return {}
        units, left_out = protocol.result_units(evaluation_input.num_classes), protocol.left_out(evaluation_input)
        units = {name: unit for name, unit in units.items() if name not in left_out}
        domains = evaluation_input.test.domains()
        own = {name: unit for name, unit in units.items() if "@" not in name}  # others are of other data sets
        return units | {domain_result(name, domain): unit for domain in domains for name, unit in own.items()}

    @property
    def trains_network(self) -> bool:
        needs_labels = self._protocol.needs_labels
        return self._protocol.trains_network and evaluation_problem(self._data, needs_labels=needs_labels) is None

    def due(self, round: int) -> bool:
        return self._every > 0 and (round % self._every == 0 or round == self._rounds)

    def evaluate(self, models: Iterable[tuple[str, SSLMethod]], *, final: bool = False) -> ResultsByModel:
        """Evaluate each model, by the protocol of the rounds or the final one. ``models`` is iterated once."""
        protocol = self._final_protocol if final else self._protocol
        return {name: self._evaluate(protocol, model) for name, model in models}

    def baselines(self, untrained: SSLMethod) -> ResultsByModel:
        """Return the final results of the untrained encoder and of raw pixels, on the same draws."""
        raw = self._input(self._final_protocol, None)
        if raw is None:
            return {}
        return {
            "untrained": self._evaluate(self._final_protocol, untrained),
            "pixels": evaluate_domains(self._final_protocol, raw, seed=self._seed),
        }

    def evaluation_input(self, method: SSLMethod) -> EvaluationInput | None:
        """Return the method's encoder and the images of the final protocol; None without any for training and test."""
        return self._input(self._final_protocol, method.encoder)

    def evaluate_final(self, evaluation_input: EvaluationInput) -> dict[str, Score]:
        return evaluate(self._final_protocol, evaluation_input, seed=self._seed)

    def _input(self, protocol: EvaluationProtocol, encoder: nn.Module | None) -> EvaluationInput | None:
        return make_evaluation_input(encoder, self._data, device=self._device, needs_labels=protocol.needs_labels)

    def _evaluate(self, protocol: EvaluationProtocol, method: SSLMethod) -> dict[str, Score]:
        evaluation_input = self._input(protocol, method.encoder)
        if evaluation_input is None:
            return {}
        results = evaluate_domains(protocol, evaluation_input, seed=self._seed)
        if method.uses_labels:
            h = evaluation_input.features.test

            def classify(used: torch.device, chunk: int) -> Tensor | None:
                classifier = method if used == self._device else module_on_cpu(method)
                with torch.no_grad():
                    logits = [classifier.classify(part.to(used)) for part in h.split(chunk)]
                known = [part.cpu() for part in logits if part is not None]
                return torch.cat(known) if known else None

            logits = retry_in_chunks(classify, device=self._device, chunk=len(h), what="images are classified")
            labels = evaluation_input.test.labels
            has_label = labels != NO_LABEL
            if logits is not None and has_label.any():
                known = logits.argmax(dim=1)[has_label], labels[has_label]
                results[CLASSIFIER] = Score(accuracy(*known), num_images=len(known[1]))
        return results


def missing_evaluations(settings: Settings) -> dict[str, str]:
    """Return why an evaluation that is set has no images, by its setting."""
    evaluation, found = settings.evaluation, {}
    slots = {"evaluation": evaluation.protocol} if evaluation.every else {}
    for name, component in {**slots, "final_evaluation": evaluation.final_protocol}.items():
        protocol = check_protocol(component.instantiate())
        problem: str | None = NO_SERVER_DATA
        if settings.data.federated is not None:
            problem = evaluation_problem(settings.data, needs_labels=protocol.needs_labels)
        if problem and protocol.result_units(num_classes=2):
            found[name] = problem
    return found


def personalized_models_have_labels(parts: RunParts) -> Problem:
    """Refuse to evaluate personalized models without labels."""
    if parts.context.is_deployment or not parts.settings.evaluation.personalized:
        return None
    problem = evaluation_problem(parts.settings.data)
    if problem is None and parts.has_labels():
        return None
    return f"evaluate_personalized=true needs labels; {problem or 'the images of the clients have none'}"


RUN_RULES = (personalized_models_have_labels,)
