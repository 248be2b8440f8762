"""Models of other programs for the measurements of a machine: a BERT as a directory, and sizes for PyTorch.

The BERT has random weights and the words `w0`, `w1`, … as its vocabulary. Nothing is downloaded.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxlm.interop.exchange import config_from_model
from jaxlm.models import family_of
from jaxlm.models.bert import BertConfig
from jaxlm.models.gpt import GPTConfig

_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def torch_sizes(model: Any, classes: bool) -> dict[str, Any] | None:
    """Return the sizes of the same model in `torch_step`, for a head of classes or the output of pretraining.

    None for a model for which PyTorch has no layers.
    """
    if not isinstance(model, GPTConfig | BertConfig):
        return None
    names = ("width", "num_heads", "num_layers", "dropout_rate", "attention_dropout_rate")
    sizes = {field: getattr(model, field) for field in names} | {"classes": classes}
    sizes |= {"vocab_size": model.vocab_size or family_of(model).vocab_size}
    causal = isinstance(model, GPTConfig)
    return sizes | {"causal": causal, "norm": model.norm if isinstance(model, GPTConfig) else "post"}


def write_bert(folder: Path, model: BertConfig) -> None:
    """Write a BertModel with random weights as Hugging Face's directory: config.json, vocab.txt, model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    width, inner = model.width, model.feed_forward_width
    values = config_from_model(model) | {"architectures": ["BertModel"]}
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    words = [f"w{number}" for number in range(model.vocab_size - len(_SPECIALS))]
    (folder / "vocab.txt").write_text("\n".join([*_SPECIALS, *words]) + "\n")
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (model.vocab_size, width)}
    shapes |= {"embeddings.position_embeddings.weight": (model.num_positions, width)}
    shapes |= {"embeddings.token_type_embeddings.weight": (model.num_types, width), "embeddings.LayerNorm": (width,)}
    for layer in (f"encoder.layer.{number}." for number in range(model.num_layers)):
        shapes |= {f"{layer}attention.self.{name}": (width, width) for name in ("query", "key", "value")}
        shapes |= {f"{layer}attention.output.dense": (width, width), f"{layer}attention.output.LayerNorm": (width,)}
        shapes |= {f"{layer}intermediate.dense": (inner, width), f"{layer}output.dense": (width, inner)}
        shapes |= {f"{layer}output.LayerNorm": (width,)}
    shapes |= {"pooler.dense": (width, width)}
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith(".weight"):
            tensors[name] = rng.normal(0, model.init_std, shape).astype(np.float32)
            continue
        norm = len(shape) == 1
        weight = np.ones(shape) if norm else rng.normal(0, model.init_std, shape)
        tensors |= {f"{name}.weight": weight.astype(np.float32), f"{name}.bias": np.zeros(shape[0], np.float32)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
