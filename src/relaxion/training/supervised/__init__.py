"""Supervised learning of stiffness: examples from relaxations, one fit, one test of what was learned."""
