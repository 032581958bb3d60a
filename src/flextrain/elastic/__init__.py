"""The gang: one agent per node that starts, watches and ends the ranks. Torch-free: an agent outlives its trainers."""

from flextrain.elastic.scaling import (
    GradAccumulationConfig,
    GradientAccumulationManager,
    LRScalingManager,
    ScalingConfig,
    ScalingRule,
)

__all__ = ["GradAccumulationConfig", "GradientAccumulationManager", "LRScalingManager", "ScalingConfig", "ScalingRule"]
