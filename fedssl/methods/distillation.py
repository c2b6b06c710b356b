"""Distillation: a small encoder learns the features of a large public one, the teacher, on unlabeled images.

The student's projection of every view is compared with the teacher's feature of the un-augmented image. The target is
therefore one per image: the student becomes invariant to the augmentation. SEED (Fang et al., arXiv 2101.04731), and
distillation in LightlyTrain, instead give student and teacher the same view, so that the teacher runs in every step.
Here it runs once per image, and its features are cached on the client (`fedssl.methods.teacher.TeacherFeatures`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.datasets.images import ImageSource
from fedssl.encoders import Encoder
from fedssl.errors import InputError
from fedssl.losses import at_least_float32, feature_mse, similarity_distillation, teacher_distance
from fedssl.methods.base import TEACHER, ImageTargets, SSLMethod
from fedssl.methods.heads import MLP
from fedssl.methods.teacher import TeacherFeatures, build_teacher
from fedssl.views import Views

QUEUE = "queue"


class Distillation(SSLMethod):
    r"""Encoder, a projector to the length of the teacher's features, and the teacher.

    All views are concatenated into one forward pass. The part ``teacher`` is downloaded once. With
    ``loss="similarity"`` the part ``queue`` ``(queue_size, dim)`` has the teacher's normalized features of the client's
    last images, newest first; rows of zeros are empty. It stays with the client and is kept between its rounds.

    $$
    \text{cosine: } \frac{1}{2n} \sum_{i=1}^{2n}
    \left\lVert \frac{z_i}{\lVert z_i \rVert} - \frac{t_i}{\lVert t_i \rVert} \right\rVert^2 \qquad
    \text{mse: } \frac{1}{2nm} \sum_{i=1}^{2n} \lVert z_i - t_i \rVert^2
    $$

    $$
    \text{similarity: } -\frac{1}{2n} \sum_{i=1}^{2n} \sum_{d \in D_i}
    \operatorname{softmax}_d(\cos(t_i, d) / \tau_t) \log \operatorname{softmax}_d(\cos(z_i, d) / \tau_s)
    $$

    with $z_i$ the projection of view i, $t_i$ the teacher's feature of its image, of length m, and $D_i$ that feature
    and those of the queue.

    ``projector`` builds the projector from the lengths of a representation and, as ``out_dim``, of the teacher's
    features. ``teacher_encoder`` are plain values (`fedssl.export.describe_encoder`), which the server reads from the
    file of the setting ``teacher``; None is rejected.
    """

    equal_global_sizes = True
    teacher_sees_views = False

    def __init__(
        self,
        encoder: Encoder,
        *,
        projector: Callable[..., MLP],
        teacher_encoder: Mapping[str, Any] | None,
        loss: str,
        queue_size: int,
        student_temperature: float,
        teacher_temperature: float,
        cache_bytes: int,
    ) -> None:
        if teacher_encoder is None:
            raise InputError(
                "method=distillation needs a teacher, and teacher=null; give teacher=FILE, the encoder.pt of a run"
            )
        super().__init__()
        self.encoder = encoder
        teacher = build_teacher(teacher_encoder)
        self.projector = projector(encoder.feature_dim, out_dim=teacher.feature_dim)
        self.teacher = teacher
        self.broadcast_parts = self.static_parts = (TEACHER,)
        self.objective = loss
        self.student_temperature, self.teacher_temperature = student_temperature, teacher_temperature
        self.features = TeacherFeatures(
            size=teacher_encoder["arguments"]["size"],
            mean=tuple(teacher_encoder["mean"]),
            std=tuple(teacher_encoder["std"]),
            cache_bytes=cache_bytes,
        )
        self.queue: Tensor
        if loss == "similarity":
            self.register_buffer(QUEUE, torch.zeros(queue_size, teacher.feature_dim))
            self.keep_local(QUEUE)

    def store_targets_in(self, folder: Path) -> None:
        self.features.store_in(folder)

    def targets(
        self, images: ImageSource, indices: Tensor, *, on_step_start: Callable[[], None] = lambda: None
    ) -> ImageTargets:
        return self.features.targets(self.teacher, images, indices, on_step_start=on_step_start)

    def loss(self, views: Views) -> Tensor:
        assert views.targets is not None  # see `targets`
        z = self.projector(self.encoder(torch.cat(views.images)))
        teacher_features = views.targets.repeat(len(views), 1)
        if self.objective == "cosine":
            return teacher_distance(z, teacher_features)
        if self.objective == "mse":
            return feature_mse(z, teacher_features)
        loss = similarity_distillation(
            z,
            teacher_features,
            self.queue.clone(),  # the gradient needs it, and `enqueue` overwrites it
            student_temperature=self.student_temperature,
            teacher_temperature=self.teacher_temperature,
        )
        self.enqueue(views.targets)
        return loss

    @torch.no_grad()
    def enqueue(self, features: Tensor) -> None:
        """Insert the normalized features of a batch ``(batch, dim)`` at the front of the queue."""
        newest = F.normalize(at_least_float32(features), dim=1)
        self.queue.copy_(torch.cat((newest, self.queue))[: len(self.queue)])
