"""Who learns: DDPG, TD3, D4PG and SAC, one file each, in the order of their papers."""
