"""What a Metaflow flow needs to run flextrain: refs, places, the gang, Kubernetes requests and cards. Torch-free."""

from flextrain.flowkit.refs import CheckpointRef, IndexRef, Launch, TrainRef

__all__ = ["CheckpointRef", "IndexRef", "Launch", "TrainRef"]
