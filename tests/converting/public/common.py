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
ROWS, TOKENS, NEW = 2, 19, 12  # a prime length: never a multiple of a chunk


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
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if k not in tied}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    ids = torch.tensor(np.random.default_rng(0).integers(0, vocabulary, (ROWS, TOKENS)))
    with torch.no_grad():
        found, text = model(ids).logits, ids[:, :5]
        for _ in range(NEW):
            text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], dim=1)
    arrays = {"ids": ids, "logits": found.to(torch.float32), "greedy": text}
    np.savez_compressed(folder / "expected.npz", **{k: v.numpy() for k, v in arrays.items()})
