from megatron_packed.config.run import RunConfig as RunConfig
from megatron_packed.config.sections.model import ModelConfig as ModelConfig
from megatron_packed.cuda_graphs.layer_graphs import LayerGraphs as LayerGraphs
from megatron_packed.cuda_graphs.replaced_forward import KeywordLayer as KeywordLayer
from megatron_packed.data.packed_dataset import PackedDataset as PackedDataset
from megatron_packed.data.packing.packer import Packer as Packer
from megatron_packed.data.tokenizers.base import ByteTokenizer as ByteTokenizer
from megatron_packed.distributed.flat_buffers import FlatBuffers as FlatBuffers
from megatron_packed.memory.activation_offload import Offload as Offload
from megatron_packed.memory.apply import offload_module as offload_module
from megatron_packed.models.hybrid_model import HybridModel as HybridModel
from megatron_packed.packed.capture_sizes import CaptureSizes as CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch as MicroBatch
from megatron_packed.packed.params import PackedSeqParams as PackedSeqParams
from megatron_packed.training.callback import Callback as Callback
from megatron_packed.training.from_python import train as train
from megatron_packed.training.trained_model import TrainedModel as TrainedModel

__version__: str
