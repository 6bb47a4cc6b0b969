"""Moving bytes between nodes: the transport protocol and its three implementations."""
