"""ServerApp: averages encoders by L-DAWA, and classifies test digits by their nearest neighbor."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from sklearn.neighbors import KNeighborsClassifier

from digits_ssl.client import images_and_labels, make_network
from strategies.flower import LDAWA

app = ServerApp()


def accuracy(round: int, arrays: ArrayRecord) -> MetricRecord:
    """Return the accuracy of the encoder's features after a round."""
    network = make_network()
    network.load_state_dict(arrays.to_torch_state_dict())
    images, labels = images_and_labels()
    features = network["encoder"].eval()(images).detach().numpy()
    train, test = slice(None, 1400), slice(1400, None)
    classifier = KNeighborsClassifier(1).fit(features[train], labels[train])
    return MetricRecord({"accuracy": float(classifier.score(features[test], labels[test]))})


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, and save the encoder."""
    strategy = LDAWA(fraction_evaluate=0.0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(make_network().state_dict()),
        num_rounds=int(context.run_config["rounds"]),
        evaluate_fn=accuracy,
    )
    print(result.evaluate_metrics_serverapp)
