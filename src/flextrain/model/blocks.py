"""Finding the repeated decoder blocks of a model: the unit of compiling, activation checkpointing and sharding."""

from torch import nn


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks in order: children of the ModuleList or Sequential of one class that holds the most parameters.

    Finds `GPT.blocks`, `model.layers` of Llama, `transformer.h` of GPT-2 and their like; [] where nothing repeats.
    """
    best: list[nn.Module] = []
    most = 0
    for module in model.modules():
        children = list(module.children()) if isinstance(module, nn.ModuleList | nn.Sequential) else []
        if len({type(child) for child in children}) != 1:
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        if size > most:
            best, most = children, size
    return best
