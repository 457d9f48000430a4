"""Everything needed to show kvflow on one machine: a tiny model, engine processes, and the demo itself."""
