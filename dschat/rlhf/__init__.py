"""Reinforcement learning from human feedback: advantages and losses (pure torch), experience, engine, trainer."""
