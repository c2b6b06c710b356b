"""FedSSL-Bench: 18 aggregation rules and five methods under one protocol; `benchmarks/bench.py` runs it."""
