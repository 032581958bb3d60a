"""The only maker of device meshes."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flextrain.errors import ConfigError
from flextrain.world import World


def make_mesh(world: World, strategy: str, device_type: str) -> DeviceMesh | None:
    """The mesh a strategy shards over: axis `shard`, and for hsdp `replicate` x `shard` (nodes x ranks of a node).

    None for ddp and for a world of one. Raises ConfigError where hsdp's nodes are of unequal size.
    """
    if world.size == 1 or strategy == "ddp":
        return None
    if strategy != "hsdp":
        return init_device_mesh(device_type, (world.size,), mesh_dim_names=("shard",))
    if world.size % world.local_size:
        raise ConfigError(
            f"hsdp needs nodes of equal size; {world.size} ranks do not divide into nodes of {world.local_size}",
            number=21,
            remedy="use distributed.strategy fsdp, or the same ranks_per_node everywhere",
        )
    shape = (world.size // world.local_size, world.local_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
