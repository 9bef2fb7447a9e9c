from megatron_packed.checkpoint.background_save import BackgroundSaves as BackgroundSaves
from megatron_packed.checkpoint.errors import (
    CheckpointError as CheckpointError,
)
from megatron_packed.checkpoint.errors import (
    CheckpointMismatchError as CheckpointMismatchError,
)
from megatron_packed.checkpoint.errors import (
    NoCheckpointError as NoCheckpointError,
)
from megatron_packed.checkpoint.load import (
    find_checkpoints as find_checkpoints,
)
from megatron_packed.checkpoint.load import (
    load_checkpoint as load_checkpoint,
)
from megatron_packed.checkpoint.load_attempt import LoadedCheckpoint as LoadedCheckpoint
from megatron_packed.checkpoint.manifest import (
    Manifest as Manifest,
)
from megatron_packed.checkpoint.manifest import (
    read_manifest as read_manifest,
)
from megatron_packed.checkpoint.read_tensors import read_tensor as read_tensor
from megatron_packed.checkpoint.save import (
    SavedCheckpoint as SavedCheckpoint,
)
from megatron_packed.checkpoint.save import (
    save_checkpoint as save_checkpoint,
)
from megatron_packed.checkpoint.tensor_shard import TensorShard as TensorShard
