"""The OpenAI-compatible front door: chooses engines, draws transfer ids and sends both legs of a request at once."""
