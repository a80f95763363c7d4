"""Where starts come from: alloys, slabs, clusters, packings, prototypes, molecules, perturbations; all seeded."""
