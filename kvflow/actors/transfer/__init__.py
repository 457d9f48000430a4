"""The transfer actor: pushes a source rank's blocks into its targets while they are being computed."""
