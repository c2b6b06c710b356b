"""Copies between host and accelerator, and waits of the host, in the round of one client and in an evaluation.

    uv run python benchmarks/copies.py [--encoders conv_small resnet18] [--methods simclr byol]

No GPU is needed: the accelerator is that of the tests (tests/accelerator), which needs a C++ compiler. It computes on
the CPU and records every copy and wait. Clients have 32 images of 8x8 pixels, and train two epochs of four steps. The
counted round is the second, in which clients have state.

layers   Layers of the model, with those that stay on the client.
in, out  Copies to the accelerator and to the host, in the round of a client. ``in`` includes two per epoch: order of
         the images, and parameters of the views.
waits    Times at which the host waits for the accelerator.
eval     The same for the evaluation of one model by kNN, on 240 + 60 images.
"""

from collections import Counter

import torch

from benchmarks.common import make_parser
from tests.accelerator import device

METHODS = ("simclr", "byol", "simsiam", "barlow_twins", "moco_v3", "fedx", "orchestra", "fedca", "supervised")
CLIENTS = 2
COMMON = ["dataset=digits", f"num_clients={CLIENTS}", "partition=iid", "local_epochs=2", "batch_size=8", "threads=1"]
COMMON += ["strategy=fedavg", "evaluation=knn"]
SMALL, LABELED = ["dataset.limit=64", "evaluate_every=0"], ["dataset.limit=300", "evaluate_every=1"]


def count_round(encoder: str, method: str) -> tuple[int, Counter[str]]:
    """Return the layers of a client's model, and the events of its second round."""
    from benchmarks.local_engine import Federation  # imports the project, which finds the accelerator

    federation = Federation(*COMMON, *SMALL, f"encoder={encoder}", f"method={method}")
    federation()
    with device.recorded() as events:
        federation()
    counts = Counter(event.kind for event in events)
    return len(federation.components.method.named_tensors), Counter({kind: n // CLIENTS for kind, n in counts.items()})


def count_evaluation(encoder: str, method: str) -> Counter[str]:
    """Return the events of the evaluation of one model."""
    from benchmarks.local_engine import Federation
    from server_app.models import load_each

    federation = Federation(*COMMON, *LABELED, f"encoder={encoder}", f"method={method}")
    federation()
    components = federation.components
    models = {name: model.layers for name, model in federation.state.models.items()}
    with device.recorded() as events:
        components.evaluator.evaluate(load_each(components.method, models))
    return Counter(event.kind for event in events)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--encoders", nargs="+", default=["conv_small", "resnet18"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    options = parser.parse_args()
    device.register()
    from tests.accelerator import stand_in  # after the registration

    stand_in.prepare()
    torch.set_num_threads(1)
    print("encoder      method       layers    in   out  waits   eval:  in   out  waits")
    for encoder in options.encoders:
        for method in options.methods:
            layers, events = count_round(encoder, method)
            evaluation = count_evaluation(encoder, method)
            kinds = ("to_device", "to_host", "synchronize")
            row, other = ([counts[kind] for kind in kinds] for counts in (events, evaluation))
            print(
                f"{encoder:12s} {method:12s} {layers:6d} {row[0]:5d} {row[1]:5d} {row[2]:6d}"
                f" {other[0]:10d} {other[1]:5d} {other[2]:6d}",
                flush=True,
            )


if __name__ == "__main__":
    main()
