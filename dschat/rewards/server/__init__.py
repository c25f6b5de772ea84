"""HTTP server for a reward model."""
