"""Resumable checkpoints: written atomically, and verified before they are loaded."""
