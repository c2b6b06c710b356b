"""Exchanges of a round's messages with clients."""
