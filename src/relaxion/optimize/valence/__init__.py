"""What is bonded by valence: coordinates, force constants, secants and steps along bonds, bends and torsions."""
