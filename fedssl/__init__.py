"""Federated self-supervised learning: the learning library, independent of servers and clients."""
