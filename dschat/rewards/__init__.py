"""Reward sources that score responses: models, functions, rules, services, and their weighted sum."""
