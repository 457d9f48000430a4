"""The node of a host: it starts, watches and stops the processes that run the actors."""
