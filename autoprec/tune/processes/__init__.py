"""Where trials run: a process that may die, several workers, the ranks of a torchrun job."""
