"""Federated self-supervised learning: the learning library, which knows nothing of servers and clients."""
