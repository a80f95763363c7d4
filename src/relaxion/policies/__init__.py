"""The shipped policies."""
