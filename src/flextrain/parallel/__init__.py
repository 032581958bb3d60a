"""How ranks share a model: one mesh, one function that applies a strategy, and the model stays plain."""

from flextrain.parallel.apply import Parallelized, parallelize, resolve_strategy
from flextrain.parallel.group import join_group, leave_group
from flextrain.parallel.mesh import make_mesh

__all__ = ["Parallelized", "join_group", "leave_group", "make_mesh", "parallelize", "resolve_strategy"]
