"""Internal coordinates of molecules."""
