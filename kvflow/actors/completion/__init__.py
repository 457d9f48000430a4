"""The completion actor: learns that every source rank has written, and tells the target engine once."""
