"""Relaxations on disk."""
