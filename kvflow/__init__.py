"""Event-driven actors that push KV cache between disaggregated LLM engines."""

__version__ = "0.1.0"
