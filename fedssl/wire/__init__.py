"""What server and clients exchange: messages, their records, and the format of arrays on the wire."""
