"""Whether two mathematical answers are equal."""
