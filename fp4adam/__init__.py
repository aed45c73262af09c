"""Fused AdamW for models whose weights live in 4 or 8 bits."""

from inspect import ismodule as _ismodule

from fp4adam import fp4_utils as fp4_utils
from fp4adam import fp8_utils as fp8_utils
from fp4adam.checkpoints.export import export_checkpoint as export_checkpoint
from fp4adam.checkpoints.export import export_masters as export_masters
from fp4adam.checkpoints.export import export_tensors as export_tensors
from fp4adam.checkpoints.import_checkpoint import import_checkpoint as import_checkpoint
from fp4adam.checkpoints.trainable import make_trainable as make_trainable
from fp4adam.checkpoints.updates import UpdateLost as UpdateLost
from fp4adam.checkpoints.updates import WeightReceiver as WeightReceiver
from fp4adam.checkpoints.updates import WeightSender as WeightSender
from fp4adam.checkpoints.updates import WeightUpdate as WeightUpdate
from fp4adam.distributed import collectives as _collectives
from fp4adam.distributed.shards import check_shards as check_shards
from fp4adam.formats.float8 import Float8Quantizer as Float8Quantizer
from fp4adam.formats.float8_block import Float8BlockQuantizer as Float8BlockQuantizer
from fp4adam.formats.mxfp4 import MXFP4Quantizer as MXFP4Quantizer
from fp4adam.formats.mxfp8 import MXFP8Quantizer as MXFP8Quantizer
from fp4adam.formats.nvfp4 import NVFP4Quantizer as NVFP4Quantizer
from fp4adam.formats.scale_groups import hf_scale_groups as hf_scale_groups
from fp4adam.interop import torchao as _torchao
from fp4adam.interop.adapter import TensorAdapter as TensorAdapter
from fp4adam.interop.adapter import register_adapter as register_adapter
from fp4adam.interop.transformer_engine import workspaces_of as workspaces_of
from fp4adam.nn import linear as _linear
from fp4adam.nn import transposed_weight as _transposed_weight
from fp4adam.nn.dequantize_model import dequantize_model as dequantize_model
from fp4adam.nn.quantize_model import is_hidden_linear as is_hidden_linear
from fp4adam.nn.quantize_model import quantize_model as quantize_model
from fp4adam.nn.quantize_model import quantized_init as quantized_init
from fp4adam.nn.quantize_model import use_plain_state_dict as use_plain_state_dict
from fp4adam.nn.recipe import Recipe as Recipe
from fp4adam.nn.report import QuantizationMonitor as QuantizationMonitor
from fp4adam.nn.report import summary as summary
from fp4adam.optim.copies import cast as cast
from fp4adam.optim.fp4_adam import FP4Adam as FP4Adam
from fp4adam.optim.fused_adam import FusedAdam as FusedAdam
from fp4adam.optim.gradient_release import GradientRelease as GradientRelease
from fp4adam.optim.master_weight_optimizer import MasterWeightOptimizer as MasterWeightOptimizer
from fp4adam.tensors import operators as _operators
from fp4adam.tensors.quantized_tensor import QuantizedTensor as QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer as Quantizer

__version__ = "0.1.0"

# Without modules: they would replace those of the same name, such as torch.nn.
__all__ = [name for name, value in vars().items() if not (name[0] == "_" or _ismodule(value))]
