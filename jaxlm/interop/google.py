"""Google's releases of BERT: bert_config.json, vocab.txt and a TensorFlow checkpoint (google-research/bert)."""

import re
from dataclasses import replace
from pathlib import Path

from jaxlm.errors import InputError
from jaxlm.interop.bundle import Bundle
from jaxlm.interop.exchange import EXCHANGES, model_from_config, parts_of
from jaxlm.interop.files import read_object
from jaxlm.interop.published import Published, backbone_shapes, check_sizes, part_shapes
from jaxlm.interop.rules import read_leaves
from jaxlm.text import Case, wordpiece_tokenizer

NORM_EPS = 1e-12  # absent from the config: the default of tf.contrib's layer_norm (modeling.py:362-365)
# The optimizer's state, in checkpoints from which training can continue.
_NOT_THE_MODEL = re.compile(r"(^|/)(adam_[mv]|global_step|AdamWeightDecayOptimizer.*|LAMB.*)(_\d+)?$")


def read(directory: Path, spec: str, case: Case = "auto") -> Published:
    """Return the model in `directory`. InputError, one line, for damaged or missing files, or without counterpart here.

    case: as in `wordpiece_tokenizer`.
    """
    config = directory / "bert_config.json"
    values = read_object(config)
    # The original has only the tanh form of GELU, under this name (modeling.py:264-277).
    act = values.get("hidden_act")
    given = values | {"model_type": "bert", "layer_norm_eps": NORM_EPS}
    model = model_from_config(given | {"hidden_act": "gelu_new" if act == "gelu" else act}, str(config))
    bundle = Bundle(_prefix(directory))
    bert = EXCHANGES["bert"]
    modern, _ = bert.modern_names([_name(name) for name in bundle.infos if not _NOT_THE_MODEL.search(name)])
    stored = {_name(name): name for name in bundle.infos}
    names = {today: stored[spelt] for today, spelt in modern.items()}
    check_sizes(model, bundle.infos, names, str(config))
    parts = parts_of(names)
    shapes = backbone_shapes(model) | part_shapes(model, parts, 2)
    kernels = _Transposed(bundle)
    leaves = read_leaves(bert.rules(parts), shapes, kernels, names, model.num_layers)
    vocabulary = directory / "vocab.txt"
    tokenizer = wordpiece_tokenizer(vocabulary, case) if vocabulary.is_file() else None
    return Published(
        name=spec,
        model=model,
        leaves=leaves,
        tokenizer=tokenizer,
        fingerprint=bundle.fingerprint(),
        architecture="BertForPreTraining",
        dtype="F32",
        parts=tuple(parts),
        notes=() if tokenizer is None else tokenizer.notes,
    )


class _Transposed:
    """A checkpoint's tensors in PyTorch's layout: TensorFlow stores a dense layer's kernel as (input, output)."""

    def __init__(self, bundle: Bundle):
        self.bundle = bundle
        self.infos = {
            name: replace(info, shape=info.shape[::-1]) if name.endswith("/kernel") else info
            for name, info in bundle.infos.items()
        }

    def read(self, name: str):
        values = self.bundle.read(name)
        return values.T if name.endswith("/kernel") else values


def _prefix(directory: Path) -> Path:
    found = sorted(directory.glob("*.ckpt*.index"))
    if len(found) != 1:
        count = "no" if not found else f"{len(found)}"
        raise InputError(f"{directory} has {count} *.ckpt*.index files; it must have one TensorFlow checkpoint")
    return found[0].with_name(found[0].name.removesuffix(".index"))


def _name(name: str) -> str:
    """Convert a name like `bert/encoder/layer_0/attention/self/query/kernel` (modeling.py:171-232, 826-882)."""
    name = re.sub(r"layer_(\d+)", r"layer.\1", name.replace("/", "."))
    name = re.sub(r"_embeddings$", "_embeddings.weight", name)
    name = name.removesuffix(".kernel") + ".weight" if name.endswith(".kernel") else name
    name = name.replace("cls.predictions.output_bias", "cls.predictions.bias")
    name = name.replace("cls.seq_relationship.output_weights", "cls.seq_relationship.weight")
    return name.replace("cls.seq_relationship.output_bias", "cls.seq_relationship.bias")
