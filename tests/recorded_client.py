"""A client whose training steps can be recorded, see `tests.recording`."""

from dataclasses import replace

import torch

from fedssl.config.load import compose
from fedssl.datasets.images import TensorImages
from fedssl.machine.cuda_graphs import CudaGraphCache
from fedssl.methods.base import build_method
from fedssl.schedule.stages import set_active_stages
from fedssl.seeding import seed_generators, torch_generator
from fedssl.training import LocalTrainer, train
from tests.recording import Recorder

# 2^-10 is the same number in float32, in which recorded steps read it.
SMALL = ["dataset=digits", "encoder.width=4", "batch_size=8", "local_epochs=2", "optimizer.fused=true"]
SMALL += ["optimizer.lr=0.0009765625", "threads=1"]


class Client:
    """A method, and how it is trained, in several rounds on the same images."""

    def __init__(self, *overrides, record=None):
        settings = compose([*SMALL, *overrides])
        self.method = build_method(settings.model)
        self.training = LocalTrainer.build(settings.training, self.method)
        if record is not None:
            self.training = replace(self.training, graphs=CudaGraphCache(self.training.optimizer, record))
        self.rounds, self.losses = 0, []

    def round(self, num_images=24, *, depth=None, frozen=0):
        images = torch.randint(256, (num_images, 1, 8, 8), dtype=torch.uint8, generator=torch_generator(0, "pictures"))
        labels = torch.arange(num_images) % 10 if self.method.uses_labels else None
        seed_path = (0, "round", self.rounds)
        seed_generators(self.rounds, torch.device("cpu"))
        with set_active_stages(self.method, depth=depth, frozen=frozen):
            self.method.start_round(first=self.rounds == 0 or depth is not None)
            self.training.reset_optimizer(lr_factor=0.5**self.rounds)
            rows, generator = torch.arange(num_images), torch_generator(*seed_path)
            own = {"training": self.training, "generator": generator, "labels": labels}
            self.losses.append(train(self.method, TensorImages(images), rows, **own).loss)
            self.method.end_round()
        self.rounds += 1

    def views(self, num_images=4):
        images = torch.zeros(num_images, 1, 8, 8, dtype=torch.uint8)
        return self.training.augment(images, torch_generator(0, "views"))

    def is_like(self, other):
        mine, theirs = self.method.state_dict(), other.method.state_dict()
        return self.losses == other.losses and all(torch.equal(mine[name], theirs[name]) for name in mine)


def both_ways(*overrides, rounds=2, **how):
    """A client whose steps are recorded, the recorder, and a client whose steps are not."""
    recorder = Recorder()
    recorded, plain = Client(*overrides, record=recorder), Client(*overrides)
    for client in (recorded, plain):
        for _ in range(rounds):
            client.round(**how)
    return recorded, recorder, plain
