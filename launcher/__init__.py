"""How a job starts: the command line, the mpirun command, the per-rank entry."""
