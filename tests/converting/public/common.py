"""Writes a small random model of a public library, with its logits and its greedy continuation, for the tests here.

These scripts run in environments of their own, which the .txt file beside each tells, from the root of a clone:
`python tests/converting/public/hugging_face.py`. Tests read what they wrote.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

FIXTURES = Path(__file__).parents[1] / "fixtures"
ROWS, NEW = 2, 12


def randomized(model, seed=0):
    """The model with weights far from any initialization, so that no norm, bias or gate is idle."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad):
            start = weight if weight.dim() == 1 and not name.endswith("bias") else torch.zeros_like(weight)
            weight.copy_(start + 0.2 * torch.randn(weight.shape))
    return model.eval()


def write(name, model, config, vocabulary, tied=()):
    """Writes one folder.

    Args:
      name: The folder.
      model: A module in float32, whose output has `logits`.
      config: What config.json says.
      vocabulary: Number of ids.
      tied: Names of tensors that others share.
    """
    folder = FIXTURES / name
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.cpu().contiguous() for k, v in model.state_dict().items() if k not in tied}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    device = next(model.parameters()).device
    tokens = 131 if device.type == "cuda" else 19  # primes: never a multiple of a chunk; kernels by chunks need over 64
    ids = torch.tensor(np.random.default_rng(0).integers(0, vocabulary, (ROWS, tokens)), device=device)
    with torch.no_grad():
        found, text = model(ids).logits, ids[:, :5]
        for _ in range(NEW):
            text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], dim=1)
    arrays = {"ids": ids, "logits": found.to(torch.float32), "greedy": text}
    np.savez_compressed(folder / "expected.npz", **{k: v.cpu().numpy() for k, v in arrays.items()})
