"""Simulate an engine with a paged cache, a scheduler and the connector, without vLLM."""
