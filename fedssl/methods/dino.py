"""DINO (Caron et al., arXiv 2104.14294): a student predicts how its teacher assigns another view to prototypes.

The teacher is the moving average of the student, as in BYOL, and sees the global views only. Its logits are centered,
against a collapse onto one prototype, and sharpened by a low temperature, against a collapse to the uniform
distribution.

Differences from the authors' code:

- Schedules over steps or epochs are schedules over rounds: the decay of the teacher (``ema_schedule``), the warm-up of
  its temperature (``warmup_rounds``), and the time in which prototypes are not trained (``freeze_last_layer_rounds``).
- The head has two parts. ``projector`` ends with the bottleneck, which regularizers use. ``prototypes`` normalize the
  bottleneck and are the last layer; its gain is always 1 (the authors' ``norm_last_layer=true``).
- Linear layers have torch's initialization. The authors draw weights from a normal distribution of standard deviation
  0.02.
- The authors evaluate the teacher, here the student is evaluated: with ``target_init=persist`` there is no global
  teacher.
- The optimizer has the same weight decay for all parameters and rounds.
"""

from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.encoders import Encoder
from fedssl.losses import at_least_float32, dino
from fedssl.methods.base import FailureMode
from fedssl.methods.heads import MLP, PrototypeHead
from fedssl.methods.momentum import EMATargetMethod
from fedssl.views import AcceptedViews, Views, by_size

UNIFORM = FailureMode(
    diagnostic="assignment_entropy",
    maximum=0.98,
    message="the teacher assigns every image to all prototypes equally; lower method.teacher_temperature and "
    "method.warmup_teacher_temperature, or raise method.center_momentum",
)
ONE_PROTOTYPE = FailureMode(
    diagnostic="prototype_entropy",
    minimum=0.05,
    message="the teacher assigns all images to one prototype; lower method.center_momentum, or raise "
    "method.teacher_temperature",
)


def assignment_entropies(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Return two entropies of assignments ``(n, K)``, each divided by log K and therefore in [0, 1].

    The first is the mean over images of the entropy of their assignments: 1 if each is uniform, 0 if each is one
    prototype. The second is the entropy of the mean assignment: 1 if all prototypes are used equally, 0 if all images
    are assigned to the same one.
    """
    entropy = torch.special.entr(torch.stack((probabilities, probabilities.mean(dim=0).expand_as(probabilities))))
    single, mean = entropy.sum(dim=2).mean(dim=1) / torch.tensor(float(probabilities.shape[1])).log()
    return single, mean


class Center(nn.Module):
    """Moving average of the teacher's logits, ``(K,)``; a statistic like those of batch normalization.

    Its buffer has the name of a running statistic, so that strategies average it and do not scale it like a weight.
    """

    running_mean: Tensor

    def __init__(self, num_prototypes: int, *, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(num_prototypes))

    @torch.no_grad()
    def update(self, logits: Tensor) -> None:
        """Update the average with logits ``(..., K)``, in train mode only."""
        if self.training:
            mean = at_least_float32(logits).flatten(end_dim=-2).mean(dim=0)
            self.running_mean.lerp_(mean, 1 - self.momentum)  # Eq. 4


class DINO(EMATargetMethod):
    r"""DINO: student and teacher networks, each of encoder, projector and prototypes, and the center.

    The parts ``encoder``, ``projector``, ``prototypes`` and ``center`` are exchanged and aggregated by the strategy.
    The center is treated like running statistics: fedavg averages it by examples, l_dawa does not scale it. The
    teacher, ``target_encoder``, ``target_projector`` and ``target_prototypes``, stays with the client unless
    ``target_init="average"``. If it stays, the logits of a client's own teacher are centered by the mean of all
    clients' centers, which the first steps of a round adapt. With ``privacy=central`` the server does not release
    statistics, and every round starts with a center of 0.

    Views of equal size share a forward pass of each encoder, and all views of the student one of the projector.

    $$
    \mathcal{L} = -\frac{1}{n G (V - 1)} \sum_{i=1}^{n} \sum_{u=1}^{G} \sum_{v \ne u} \sum_{k=1}^{K}
    P_t(u, i)_k \log P_s(v, i)_k
    $$

    $$
    P_s(v, i) = \operatorname{softmax}(s_i^{(v)} / \tau_s) \qquad
    P_t(u, i) = \operatorname{softmax}((t_i^{(u)} - c) / \tau_t) \qquad
    c \leftarrow \mu \, c + (1 - \mu) \frac{1}{nG} \sum_{i=1}^{n} \sum_{u=1}^{G} t_i^{(u)}
    $$

    $$
    \tau_t = \tau_1 + (\tau - \tau_1) \min \left( \frac{r - 1}{r_w}, 1 \right) \qquad
    m = 1 - (1 - m_1) \frac{1}{2} \left( 1 + \cos \frac{\pi (r - 1)}{R - 1} \right) \text{ (cosine)}
    $$

    with $s_i^{(v)}$ and $t_i^{(u)}$ the logits of student and teacher (cosines with the K prototypes) for the V views
    and G global views of image i, c the center, $\mu$ its momentum, r the round of R, $r_w$ the ``warmup_rounds``,
    $\tau_1$ and $m_1$ the values of round 1, and m the decay of the teacher.
    """

    accepted_views = AcceptedViews(max_global=None, local=True, augmentation="multi_crop")
    failure_modes: tuple[FailureMode, ...] = (UNIFORM, ONE_PROTOTYPE)
    target_prototypes: PrototypeHead

    def __init__(
        self,
        encoder: Encoder,
        *,
        projector: Callable[[int], MLP],
        num_prototypes: int,
        student_temperature: float,
        teacher_temperature: float,
        warmup_teacher_temperature: float,
        warmup_rounds: int,
        center_momentum: float,
        freeze_last_layer_rounds: int,
        ema_decay: float,
        ema_schedule: str = "constant",
        target_init: str = "persist",
    ) -> None:
        super().__init__(
            encoder, projector=projector, ema_decay=ema_decay, target_init=target_init, ema_schedule=ema_schedule
        )
        self.prototypes = PrototypeHead(self.projector.out_features, num_prototypes=num_prototypes)
        self.add_target("prototypes")
        self.center = Center(num_prototypes, momentum=center_momentum)
        self.student_temperature, self.teacher_temperature = student_temperature, teacher_temperature
        self.warmup_teacher_temperature, self.warmup_rounds = warmup_teacher_temperature, warmup_rounds
        self.freeze_last_layer_rounds = freeze_last_layer_rounds

    @cached_property
    def trainable(self) -> list[str]:
        """Names of the parameters that are trained, also of the prototypes, which the first rounds freeze."""
        parameters = self.named_parameters()
        return [name for name, parameter in parameters if parameter.requires_grad or name.startswith("prototypes.")]

    @property
    def current_teacher_temperature(self) -> float:
        """Teacher's temperature in the current round, which changes linearly until round ``warmup_rounds + 1``."""
        if not self.warmup_rounds:
            return self.teacher_temperature
        done = min((self.round - 1) / self.warmup_rounds, 1.0)
        first, last = self.warmup_teacher_temperature, self.teacher_temperature
        return first + (last - first) * done

    @property
    def temperatures(self) -> dict[str, float]:
        """Temperatures of student and teacher in the current round, as arguments of the losses."""
        current = self.current_teacher_temperature
        return {"student_temperature": self.student_temperature, "teacher_temperature": current}

    @property
    def late_starts(self) -> dict[str, int]:
        return {"method.freeze_last_layer_rounds": self.freeze_last_layer_rounds + 1}

    @property
    def step_constants(self) -> tuple[float, ...]:
        return (*super().step_constants, self.current_teacher_temperature)

    def start_round(self, *, first: bool) -> None:
        super().start_round(first=first)
        self.prototypes.requires_grad_(self.round > self.freeze_last_layer_rounds)

    def loss(self, views: Views) -> Tensor:
        h = torch.cat([self.encoder(images) for images in by_size(views.images)])
        student = self.prototypes(self.projector(h)).chunk(len(views))
        teacher = self.teacher_logits(views)
        loss = dino(student, teacher, center=self.center.running_mean, **self.temperatures)
        self.center.update(torch.cat(teacher))
        return loss

    @torch.no_grad()
    def teacher_logits(self, views: Views) -> tuple[Tensor, ...]:
        """Return the teacher's logits of each global view, ``(batch, K)``."""
        h = torch.cat([self.target_encoder(images) for images in by_size(views.global_images)])
        logits: Tensor = self.target_prototypes(self.target_projector(h))
        return logits.chunk(len(views.global_images))

    def diagnose(self, views: Views) -> dict[str, float]:
        """Return `assignment_entropies` of the teacher with its final temperature."""
        centered = at_least_float32(torch.cat(self.teacher_logits(views))) - self.center.running_mean
        single, mean = assignment_entropies(F.softmax(centered / self.teacher_temperature, dim=1))
        return {"assignment_entropy": single.item(), "prototype_entropy": mean.item()}
