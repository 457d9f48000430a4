"""Tools that look on: they read lifecycle events and decide nothing."""
