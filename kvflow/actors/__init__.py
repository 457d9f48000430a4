"""The actors: registration, matching, transfer and completion, each a pure reducer with a thin driver."""
