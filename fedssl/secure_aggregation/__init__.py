"""Secure aggregation (Bell et al., CCS 2020) in the wire format and field of Flower 1.41.

`server` is the half of the server, `client` that of a client.
"""
