"""The peers as PyTorch modules, and their timing by CUDA events."""

import contextlib
import gc
import math
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import device
from benchmarks.peers import BLOCKS, HEADS, HIDDEN, TASKS, VOCABULARY, WIDTH, predicted, training_flops

DEVIATION = 0.02  # of initial weights
CLIP = 0.1  # global norm of the gradient
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class Block(nn.Module):
    """Pre-norm attention with rotary positions, then a GELU-gated linear unit: `[b, n, d]` -> `[b, n, d]`."""

    def __init__(self, causal: bool):
        super().__init__()
        self.causal = causal
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.into_heads, self.out_of_heads = _linear(WIDTH, 3 * WIDTH), _linear(WIDTH, WIDTH)
        self.up, self.down = _linear(WIDTH, 2 * HIDDEN), _linear(HIDDEN, WIDTH)

    def forward(self, x, cos, sin):
        b, n, _ = x.shape
        q, k, v = self.into_heads(self.norm_1(x)).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)  # [b, h, n, s]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out_of_heads(mixed.transpose(1, 2).reshape(b, n, WIDTH))
        gate, value = self.up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.gelu(gate) * value)


class TransformerPlusPlus(nn.Module):
    """Token ids -> loss; the head is the embedding."""

    def __init__(self, causal: bool):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        nn.init.normal_(self.embedding.weight, std=DEVIATION)
        self.blocks = nn.ModuleList(Block(causal) for _ in range(BLOCKS))

    def forward(self, tokens, positions, labels):
        """Mean loss over `labels [p]` at the `positions [p]` in the flattened `tokens [b, n]`; at all if None."""
        x, cos, sin = self.start(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.finish(x, positions, labels)

    def start(self, tokens):
        cos, sin = turns(tokens.shape[1], WIDTH // HEADS, tokens.device)
        return self.embedding(tokens).to(torch.bfloat16), cos, sin  # like the residual stream of our models

    def finish(self, x, positions, labels):
        x = x.reshape(-1, WIDTH)
        x = x if positions is None else x[positions]
        return F.cross_entropy(F.linear(self.norm(x), self.embedding.weight), labels)

    def compile_parts(self):
        """Compiles one block, which serves for all, and the parts before and after the blocks, each for one shape."""
        for block in self.blocks:
            block.compile(dynamic=False)
        self.start = torch.compile(self.start, dynamic=False)
        self.finish = torch.compile(self.finish, dynamic=False)


class Gla(nn.Module):
    """The package fla's gated linear attention: 12 layers of the same width, 4 heads, its own fused loss."""

    def __init__(self, n: int):
        super().__init__()
        from fla.models import GLAConfig, GLAForCausalLM

        sizes = {"hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "num_heads": 4, "vocab_size": VOCABULARY}
        options = {"fuse_cross_entropy": True, "use_short_conv": False, "tie_word_embeddings": True}
        self.model = GLAForCausalLM(GLAConfig(**sizes, **options, max_position_embeddings=n))

    def forward(self, tokens, positions, labels):
        return self.model(input_ids=tokens, labels=tokens).loss  # the model shifts the labels itself


def rotate(x, cos, sin):
    """Turns the pairs (x[..., i], x[..., i + s/2]) in float32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def turns(n, s, where):
    """Cosines and sines of the rotary angles, `[n, s / 2]`, float32."""
    rates = 10_000 ** -(torch.arange(s // 2, device=where) / (s // 2))
    angles = torch.arange(n, device=where)[:, None] * rates
    return angles.cos(), angles.sin()


def device_name() -> str:
    """The GPU's name.

    Raises:
      ValueError: When PyTorch sees none.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"it times a CUDA GPU, and torch {torch.__version__} sees none")
    return torch.cuda.get_device_name()


def measure(args, n: int, tasks: list[str]) -> Iterator[dict]:
    """A row for each task at length n. Tasks with the same model build and compile it once."""
    for causal in sorted({TASKS[task][0] for task in tasks}, reverse=True):
        model = None
        torch._dynamo.reset()
        gc.collect()  # else the last model's memory would count into this peak
        for task in (task for task in tasks if TASKS[task][0] == causal):
            row = {"model": args.model, "framework": "PyTorch", "task": task, "n": n, "tokens": args.tokens}
            row |= {"batch": device.batch_size(n, args.tokens), "predicted": predicted(n, TASKS[task][1])}
            try:
                model = _compiled(args, n, causal) if model is None else model
                row |= _timed(args, model, row)
            except torch.OutOfMemoryError:
                row["error"] = "out of memory"
            yield row


def _compiled(args, n, causal):
    torch.manual_seed(0)
    if args.model == "gla":
        return Gla(n).cuda()  # it compiles its own kernels
    model = TransformerPlusPlus(causal).cuda()
    if args.compile == "whole":
        model.compile(dynamic=False)
    else:
        model.compile_parts()
    return model


def _timed(args, model, row):
    torch.cuda.empty_cache()
    step = make_step(model, row, "cuda")
    chosen = contextlib.nullcontext() if args.attention == "default" else sdpa_kernel(BACKENDS[args.attention])
    with chosen:
        compile_s, milliseconds, loss = _run(step, args.steps, args.warm_up)
    if not math.isfinite(loss):
        raise ValueError(f"{row['model']} at n={row['n']} trains to a loss of {loss}: a wrong step has no speed")
    flops = None if row["model"] == "gla" else row["batch"] * training_flops(row["n"], row["task"])
    found = device.timing(milliseconds, tokens=row["tokens"], flops=flops, device=device_name())
    return {**found, "peak_bytes": torch.cuda.max_memory_allocated(), "compile_s": compile_s, "last_loss": loss}


def make_step(model, row, where):
    """A function that trains one step on random tokens and returns the loss as a tensor."""
    b, n = row["batch"], row["n"]
    tokens, labels = (torch.randint(0, VOCABULARY, (b, n), device=where) for _ in range(2))
    positions, labels = None, labels.flatten()
    if row["predicted"] < n:
        first = n * torch.arange(b, device=where)[:, None]
        drawn = torch.rand(b, n, device=where).topk(row["predicted"]).indices
        positions = (first + drawn.sort().values).flatten()
        labels = labels[positions]
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, eps=1e-6, weight_decay=0.01, fused=True)

    def step():
        with torch.autocast(where, torch.bfloat16):
            loss = model(tokens, positions, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _run(step, steps, warm_up):
    """Seconds of the first step, which compiles; milliseconds of each timed step; the last loss.

    Steps are enqueued back to back, as training does.
    """
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - start
    for _ in range(warm_up):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        loss = step()
        event.record()
    torch.cuda.synchronize()
    return compile_s, [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)], loss.item()


def _linear(inputs, outputs):
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=DEVIATION)
    return layer
