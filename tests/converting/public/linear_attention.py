"""GLA and RetNet of `flash-linear-attention`, in the environment of linear_attention.txt.

On a GPU the library's own kernels run, on texts so long that it takes those by chunks. They need a GPU. Without one
each is replaced by the library's own plain function where it has one: naive operators, `rms_norm_ref` and
`rotary_embedding_ref`. SwiGLU and the gated norm, which have none, are written from their definitions.
"""

import fla.layers.gla
import fla.layers.multiscale_retention as retention
import fla.modules.mlp
import fla.modules.rotary.ops as rotary
import torch
import torch.nn.functional as F
from common import randomized, write
from fla.models import GLAConfig, GLAForCausalLM, RetNetConfig, RetNetForCausalLM
from fla.modules import FusedRMSNormGated, RMSNorm
from fla.modules.norm.layernorm import rms_norm_ref
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.retention.naive import naive_retention


def naive_gla(q, k, v, gk, **unused):
    return naive_recurrent_gla(q, k, v, gk)


def naive_retention_of_rows(q, k, v, **unused):
    return naive_retention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2), None


def plain_rotary(self, q, k, seqlen_offset=0, max_seqlen=None, cu_seqlens=None):
    self._update_cos_sin_cache(max_seqlen, device=q.device, dtype=q.dtype)
    n = q.shape[1]
    return tuple(rotary.rotary_embedding_ref(x, self._cos_cached[:n], self._sin_cached[:n]) for x in (q, k))


def plain_norm(self, x, residual=None, prenorm=False):
    return rms_norm_ref(x, self.weight, None, residual, eps=self.eps, prenorm=prenorm)


GPU = torch.cuda.is_available()
if not GPU:
    RMSNorm.forward = plain_norm
    FusedRMSNormGated.forward = lambda self, x, g: rms_norm_ref(x, self.weight, None, eps=self.eps) * F.silu(g)
    fla.modules.mlp.SwiGLULinear.forward = lambda self, x, y, weight, bias: F.linear(F.silu(x) * y, weight, bias)
    fla.layers.gla.fused_recurrent_gla = naive_gla
    retention.fused_recurrent_retention = naive_retention_of_rows
    rotary.RotaryEmbedding.forward = plain_rotary

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 40, "vocab_size": 61}
MODELS = {
    "gla": (GLAForCausalLM, GLAConfig(**SIZES)),
    "retnet": (RetNetForCausalLM, RetNetConfig(**SIZES)),
}

for name, (cls, config) in MODELS.items():
    model = randomized(cls(config)).to("cuda" if GPU else "cpu")
    write(name, model, {**config.to_dict(), "architectures": [cls.__name__]}, config.vocab_size)
