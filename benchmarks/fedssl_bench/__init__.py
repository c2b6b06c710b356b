"""FedSSL-Bench: every aggregation rule and every method under one protocol; `benchmarks/bench.py` runs it."""
