"""Thousands of structures on a pool of workers."""
