"""Geometry, planning and the agents that move bytes."""
