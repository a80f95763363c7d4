"""Fits to finished relaxations."""
