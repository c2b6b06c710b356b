"""SimCLR on the digits of scikit-learn: a Flower app with plain PyTorch and a strategy of fedssl."""
