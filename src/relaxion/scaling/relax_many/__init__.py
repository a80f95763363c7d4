"""Many thousands of structures, by many workers, and nothing lost: `relaxion relax-many`. How: docs/many.md."""
