"""Keras layers. Each holds its weights and calls one kernel; none knows of models, data or training.

Attention layers are called as `(x, padding_mask=None, segment_ids=None, positions=None, training=None)`, with x
`[b, n, d]`, `padding_mask [b, n]` True at real tokens, `segment_ids [b, n]` 0 at padding and one number a document, and
`positions [b, n]` (or `[1, n]`). By default, positions count from 0 and start again with each packed document.
"""

from flash_tf import backend  # noqa: F401
from flash_tf.layers.block import ResidualBlock
from flash_tf.layers.cross_gated_attention import CrossGatedAttention
from flash_tf.layers.feedforward.glu import GLU
from flash_tf.layers.feedforward.mlp import MLP
from flash_tf.layers.lrpe import LRPE
from flash_tf.layers.mixers.bigbird import BigBird
from flash_tf.layers.mixers.combiner import Combiner
from flash_tf.layers.mixers.diag_attention import DiagAttention
from flash_tf.layers.mixers.flash import MixedChunkAttention
from flash_tf.layers.mixers.flash_weighted import WeightedChunks
from flash_tf.layers.mixers.gau import GatedAttentionUnit
from flash_tf.layers.mixers.gau import QuadraticAttention as QuadraticAttention
from flash_tf.layers.mixers.gla import GatedLinearAttention
from flash_tf.layers.mixers.informer import Informer
from flash_tf.layers.mixers.kernelized_attention import KernelizedAttention
from flash_tf.layers.mixers.linear_attention import LinearAttention
from flash_tf.layers.mixers.linformer import Linformer
from flash_tf.layers.mixers.mamba import Mamba
from flash_tf.layers.mixers.mc_tfm import MixedChunkSelfAttention
from flash_tf.layers.mixers.nystromformer import Nystromformer
from flash_tf.layers.mixers.parallel import Parallel
from flash_tf.layers.mixers.reformer import Reformer
from flash_tf.layers.mixers.retention import Retention
from flash_tf.layers.mixers.self_attention import MultiHeadSelfAttention
from flash_tf.layers.mixers.skyformer import Skyformer
from flash_tf.layers.mixers.transformer_ls import TransformerLS
from flash_tf.layers.offset_scale import OffsetScale
from flash_tf.layers.random_features import RandomFeatures
from flash_tf.layers.relative_bias import RelativeBias
from flash_tf.layers.rotary import RotaryEmbedding
from flash_tf.layers.scale_norm import ScaleNorm
from flash_tf.layers.scaled_sin import ScaledSinusoidalEmbedding
from flash_tf.layers.simple_rms_norm import SimpleRMSNorm
from flash_tf.layers.t5_bias import T5Bias

__all__ = [
    "BigBird",
    "Combiner",
    "CrossGatedAttention",
    "DiagAttention",
    "GLU",
    "GatedAttentionUnit",
    "GatedLinearAttention",
    "Informer",
    "KernelizedAttention",
    "LRPE",
    "LinearAttention",
    "Linformer",
    "MLP",
    "Mamba",
    "MixedChunkAttention",
    "MixedChunkSelfAttention",
    "MultiHeadSelfAttention",
    "Nystromformer",
    "OffsetScale",
    "Parallel",
    "RandomFeatures",
    "Reformer",
    "RelativeBias",
    "ResidualBlock",
    "Retention",
    "RotaryEmbedding",
    "ScaleNorm",
    "ScaledSinusoidalEmbedding",
    "SimpleRMSNorm",
    "Skyformer",
    "T5Bias",
    "TransformerLS",
    "WeightedChunks",
]


def __dir__() -> list[str]:
    return __all__
