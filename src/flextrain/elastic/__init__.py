"""The gang: one agent per node that starts, watches and ends the ranks. Torch-free: an agent outlives its trainers."""
