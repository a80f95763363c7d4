"""The store of evaluated structures, and who fills it."""
