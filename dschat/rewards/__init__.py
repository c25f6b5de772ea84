"""What scores a response: models, functions, rules, services, and their weighted sum."""
