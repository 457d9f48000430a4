"""The message bus: a port, and its implementations over NATS and in memory."""
