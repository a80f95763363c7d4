"""Training data: generated starts, relaxed into a database."""
