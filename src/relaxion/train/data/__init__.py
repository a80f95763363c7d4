"""Starts, structure files, splits and what is in a relaxation database."""
