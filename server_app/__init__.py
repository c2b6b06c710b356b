"""The ServerApp: what runs on the server."""
