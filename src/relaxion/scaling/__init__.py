"""Many structures, many processes, many machines: relax-many, Ray collectors, sweeps."""
