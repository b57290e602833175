"""Softmax attention as one kernel of cuDNN: FlashAttention-2 (Dao, arXiv:2307.08691), which never writes the scores.

Keras has it on JAX. TensorFlow has no operator for it, but XLA knows it as a custom call, and TensorFlow's XLA runs a
program that it is given as text (StableHLO).
"""

import json

import keras
from keras import ops

from kernels_xla.common import nvidia
from kernels_xla.common.spec import Tensor

# The kernel's results are [b, h, n, s], in memory [b, n, h, s]; the last one is its workspace.
HEAD = """
!x = tensor<{b}x{n}x{h}x{s}x{kind}>
!result = tensor<{b}x{h}x{n}x{s}x{kind}>
!sums = tensor<{b}x{h}x{n}xf32>
#x = dense<[3, 2, 1, 0]> : tensor<4xindex>
#result = dense<[3, 1, 2, 0]> : tensor<4xindex>
#sums = dense<[2, 1, 0]> : tensor<3xindex>
#workspace = dense<0> : tensor<1xindex>
"""
FORWARD = """
module {{
  func.func public @main(%q: !x, %k: !x, %v: !x) -> (!x, !sums) {{
    %r:3 = stablehlo.custom_call @__cudnn$fmhaSoftmax(%q, %k, %v) {{
      api_version = 2 : i32, backend_config = "{options}",
      operand_layouts = [#x, #x, #x], result_layouts = [#result, #sums, #workspace]
    }} : (!x, !x, !x) -> (!result, !sums, tensor<0xui8>)
    %out = stablehlo.transpose %r#0, dims = [0, 2, 1, 3] : (!result) -> !x
    return %out, %r#1 : !x, !sums
  }}
}}
"""
BACKWARD = """
module {{
  func.func public @main(%q: !x, %k: !x, %v: !x, %sums: !sums, %dout: !x, %out: !x) -> (!x, !x, !x) {{
    %r:4 = stablehlo.custom_call @__cudnn$fmhaSoftmaxBackward(%q, %k, %v, %sums, %dout, %out) {{
      api_version = 2 : i32, backend_config = "{options}",
      operand_layouts = [#x, #x, #x, #sums, #x, #x], result_layouts = [#result, #result, #result, #workspace]
    }} : (!x, !x, !x, !sums, !x, !x) -> (!result, !result, !result, tensor<0xui8>)
    %dq = stablehlo.transpose %r#0, dims = [0, 2, 1, 3] : (!result) -> !x
    %dk = stablehlo.transpose %r#1, dims = [0, 2, 1, 3] : (!result) -> !x
    %dv = stablehlo.transpose %r#2, dims = [0, 2, 1, 3] : (!result) -> !x
    return %dq, %dk, %dv : !x, !x, !x
  }}
}}
"""
# Contracting axes, and axes of batch and head, of the products' two operands.
FORWARD_PRODUCTS = {"bmm1": ("3", "3", "02", "02"), "bmm2": ("3", "1", "01", "02")}
BACKWARD_PRODUCTS = {
    "bmm1_grad_gemm1": ("2", "1", "01", "02"),
    "bmm1_grad_gemm2": ("3", "1", "01", "02"),
    "bmm2_grad_gemm1": ("2", "1", "01", "02"),
    "bmm2_grad_gemm2": ("3", "3", "02", "02"),
}
KINDS = {"bfloat16": "bf16", "float16": "f16"}


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Softmax attention over all pairs, or over the pairs j <= i, with its gradient.

    Args:
      q: Queries, `[b, n, h, s]`, bfloat16 or float16, of a static shape. s is a multiple of 8, at most 128.
      k: Keys, of the same shape and dtype.
      v: Values, of the same shape and dtype.
      causal: Whether position i sees only positions j <= i.

    Returns:
      `[b, n, h, s]`, in the dtype of the inputs.
    """
    if keras.config.backend() == "jax":
        return ops.dot_product_attention(q, k, v, is_causal=causal)
    shape, dtype = tuple(q.shape), keras.backend.standardize_dtype(q.dtype)
    own, sums = (shape, dtype), ((shape[0], shape[2], shape[1]), "float32")

    def attend(q, k, v):
        out, logarithms = nvidia.call(program(FORWARD, FORWARD_PRODUCTS, shape, dtype, causal), [q, k, v], [own, sums])

        def gradient(dout):
            backward = program(BACKWARD, BACKWARD_PRODUCTS, shape, dtype, causal, nvidia.is_deterministic())
            return nvidia.call(backward, [q, k, v, logarithms, dout, out], [own] * 3)

        return out, gradient

    return ops.custom_gradient(attend)(q, k, v)


def program(
    text: str, products: dict, shape: tuple[int, int, int, int], dtype: str, causal: bool, deterministic: bool = False
) -> str:
    """The StableHLO of FORWARD or BACKWARD for inputs of one shape `[b, n, h, s]` and dtype.

    BACKWARD must say where operators are to be `deterministic`: XLA itself sets that in the first of several equal
    calls alone, finds no kernel for the others, and the process ends with a segmentation fault.
    """
    b, n, h, s = shape
    kernel = {
        "algorithm": {"algo_id": "0", "math_type": "TENSOR_OP_MATH", "is_cudnn_frontend": True, "workspace_size": "0"},
        "fmha_scale": s**-0.5,
        "force_deterministic": deterministic,
        "intermediate_tensor_shape": {
            "element_type": KINDS[dtype].upper(),
            "dimensions": [str(size) for size in (b, h, n, n)],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if causal else "NO_MASK",
        "max_seg_per_batch": 1,
    }
    sides = ("lhs_contracting", "rhs_contracting", "lhs_batch", "rhs_batch")
    for name, axes in products.items():
        numbers = {f"{side}_dimensions": list(own) for side, own in zip(sides, axes, strict=True)}
        kernel[f"{name}_dot_dimension_numbers"] = numbers
    options = json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": kernel}).replace('"', "\\22")
    return (HEAD + text).format(b=b, n=n, h=h, s=s, kind=KINDS[dtype], options=options)
