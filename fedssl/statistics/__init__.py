"""Statistics of the clients' images (``dataset.mean=federated``): their sums, and the messages that carry these.

The server's half is `server_app.statistics`.
"""
