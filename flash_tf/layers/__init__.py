"""Keras layers. Each holds its weights and calls one kernel; none knows of models, data or training.

Attention layers are called as `(x, padding_mask=None, segment_ids=None, positions=None, training=None)`, with x
`[b, n, d]`, `padding_mask [b, n]` True at real tokens, `segment_ids [b, n]` 0 at padding and one number a document, and
`positions [b, n]` (or `[1, n]`), which by default count from 0 and, if packed, start again with each document.
"""

from flash_tf.layers.block import ResidualBlock as ResidualBlock
from flash_tf.layers.cross_gated_attention import CrossGatedAttention as CrossGatedAttention
from flash_tf.layers.feedforward.glu import GLU as GLU
from flash_tf.layers.feedforward.mlp import MLP as MLP
from flash_tf.layers.lrpe import LRPE as LRPE
from flash_tf.layers.mixers.bigbird import BigBird as BigBird
from flash_tf.layers.mixers.combiner import Combiner as Combiner
from flash_tf.layers.mixers.diag_attention import DiagAttention as DiagAttention
from flash_tf.layers.mixers.flash import MixedChunkAttention as MixedChunkAttention
from flash_tf.layers.mixers.flash_weighted import WeightedChunks as WeightedChunks
from flash_tf.layers.mixers.gau import GatedAttentionUnit as GatedAttentionUnit
from flash_tf.layers.mixers.gau import QuadraticAttention as QuadraticAttention
from flash_tf.layers.mixers.gla import GatedLinearAttention as GatedLinearAttention
from flash_tf.layers.mixers.informer import Informer as Informer
from flash_tf.layers.mixers.kernelized_attention import KernelizedAttention as KernelizedAttention
from flash_tf.layers.mixers.linear_attention import LinearAttention as LinearAttention
from flash_tf.layers.mixers.linformer import Linformer as Linformer
from flash_tf.layers.mixers.mamba import Mamba as Mamba
from flash_tf.layers.mixers.mc_tfm import MixedChunkSelfAttention as MixedChunkSelfAttention
from flash_tf.layers.mixers.nystromformer import Nystromformer as Nystromformer
from flash_tf.layers.mixers.parallel import Parallel as Parallel
from flash_tf.layers.mixers.reformer import Reformer as Reformer
from flash_tf.layers.mixers.retention import Retention as Retention
from flash_tf.layers.mixers.self_attention import MultiHeadSelfAttention as MultiHeadSelfAttention
from flash_tf.layers.mixers.skyformer import Skyformer as Skyformer
from flash_tf.layers.mixers.transformer_ls import TransformerLS as TransformerLS
from flash_tf.layers.offset_scale import OffsetScale as OffsetScale
from flash_tf.layers.random_features import RandomFeatures as RandomFeatures
from flash_tf.layers.relative_bias import RelativeBias as RelativeBias
from flash_tf.layers.rotary import RotaryEmbedding as RotaryEmbedding
from flash_tf.layers.scale_norm import ScaleNorm as ScaleNorm
from flash_tf.layers.scaled_sin import ScaledSinusoidalEmbedding as ScaledSinusoidalEmbedding
from flash_tf.layers.simple_rms_norm import SimpleRMSNorm as SimpleRMSNorm
