"""Resumable checkpoints: written atomically, verified before they are loaded."""
