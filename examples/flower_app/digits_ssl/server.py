"""ServerApp: averages encoders by L-DAWA, and classifies test digits by their nearest neighbor."""

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from sklearn.neighbors import KNeighborsClassifier

from digits_ssl.client import digits, images, make_network
from strategies.flower import LDAWA

app = ServerApp()


def accuracy(round, arrays):
    """Return the accuracy of the encoder's features after a round."""
    network = make_network()
    network.load_state_dict(arrays.to_torch_state_dict())
    features = network["encoder"].eval()(images).detach().numpy()
    classifier = KNeighborsClassifier(1).fit(features[:1400], digits.target[:1400])
    return MetricRecord({"accuracy": classifier.score(features[1400:], digits.target[1400:])})


@app.main()
def main(grid, context):
    """Train, and print the accuracy after every round."""
    strategy = LDAWA(fraction_evaluate=0.0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(make_network().state_dict()),
        num_rounds=context.run_config["rounds"],
        evaluate_fn=accuracy,
    )
    print(result.evaluate_metrics_serverapp)
