"""Where processes run: a worker group is one process a rank; dispatch says which sequences each rank gets."""
