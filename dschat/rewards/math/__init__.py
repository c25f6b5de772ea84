"""Equality of mathematical answers."""
