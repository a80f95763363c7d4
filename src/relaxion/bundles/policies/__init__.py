"""Bundles that ship with the package: NAME.safetensors, with its model card NAME.md beside it. No code."""
