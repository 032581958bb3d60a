"""The trainer: a loop on one screen, one optimizer step, and hooks for everything else."""
