"""GAU-alpha in float64 NumPy, token by token, under the names of JunnYu's `GAU-alpha-pytorch`.

No registry has that package, so this is written from its description, https://kexue.fm/archives/9052, and from the
names and shapes of its published checkpoint. Unlike the other scripts here, it runs in the environment of this package:
`python tests/converting/public/gau_alpha.py`.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

FOLDER = Path(__file__).parents[1] / "fixtures" / "gau_alpha"
V, D, E, S, LAYERS, TYPES = 61, 32, 64, 8, 2, 2
CONFIG = {
    "architectures": ["GAUAlphaForMaskedLM"],
    "model_type": "gau_alpha",
    "vocab_size": V,
    "hidden_size": D,
    "embedding_size": D,
    "intermediate_size": E,
    "attention_key_size": S,
    "num_hidden_layers": LAYERS,
    "type_vocab_size": TYPES,
    "hidden_act": "swish",
    "normalization": "softmax_plus",
    "attention_scale": True,
    "use_bias": False,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


def weights():
    """Random float32 weights by name."""
    rng = np.random.default_rng(0)
    shapes = {
        f"gau_alpha.embeddings.{name}_embeddings.weight": (n, D) for name, n in (("word", V), ("token_type", TYPES))
    }
    for i in range(LAYERS):
        at = f"gau_alpha.encoder.layer.{i}.gau"
        shapes |= {f"{at}.i_dense.weight": (2 * E + S, D), f"{at}.o_dense.weight": (D, E)}
        shapes |= {f"{at}.{head}_scaleoffset.weight": (S,) for head in "qk"}
    drawn = {name: 0.2 * rng.normal(size=shape) for name, shape in shapes.items()}
    return {name: np.asarray(x + (len(x.shape) == 1), "float32") for name, x in drawn.items()}


def normalized(x):
    return x / np.sqrt(np.mean(x**2) + 1e-12)


def turned(x, position):
    """Neighbouring channels as one complex number."""
    found = (x[0::2] + 1j * x[1::2]) * np.exp(1j * position * 10_000.0 ** (-2 * np.arange(S // 2) / S))
    return np.stack([found.real, found.imag], axis=-1).reshape(-1)


def gau(x, of):
    """One unit over the tokens `x [n, d]`."""
    made = x @ of["i_dense.weight"].T
    made = made / (1 + np.exp(-made))
    u, v, z = made[:, :E], made[:, E : 2 * E], made[:, 2 * E :]
    q, k = ([turned(z[i] * of[f"{head}_scaleoffset.weight"], i) for i in range(len(x))] for head in "qk")
    out = []
    for i in range(len(x)):
        scores = np.array([q[i] @ k[j] for j in range(len(x))]) / np.sqrt(S) * np.log(len(x)) / np.log(512)
        attention = np.exp(scores) / np.exp(scores).sum()
        out.append(of["o_dense.weight"] @ (u[i] * (attention @ v)))
    return out


def logits(ids, found):
    """Logits `[n, V]` of one text."""
    words = found["gau_alpha.embeddings.word_embeddings.weight"]
    x = [normalized(words[i] + found["gau_alpha.embeddings.token_type_embeddings.weight"][0]) for i in ids]
    for layer in range(LAYERS):
        start = f"gau_alpha.encoder.layer.{layer}.gau."
        of = {name.removeprefix(start): w for name, w in found.items() if name.startswith(start)}
        x = [normalized(a + b) for a, b in zip(x, gau(np.array(x), of), strict=True)]
    return np.array(x) @ words.T


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    found, ids = weights(), np.random.default_rng(1).integers(1, V, (2, 19))
    exact = {name: x.astype("float64") for name, x in found.items()}
    save_file(found, FOLDER / "model.safetensors", metadata={"format": "pt"})
    (FOLDER / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    np.savez_compressed(FOLDER / "expected.npz", ids=ids, logits=np.float32([logits(row, exact) for row in ids]))
