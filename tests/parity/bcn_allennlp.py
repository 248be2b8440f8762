"""The biattentive classification network of ELMo's authors: the model of AllenNLP 0.9.0; nothing of jaxlm.

`ALLENNLP` is a directory with the sources, see `parity/allennlp_modules.py`. The model, its feed-forward, its encoders
and its maxout network are executed as they are, with a table of words and without dropout. Each linear layer of the
original has its transposed kernel here.
"""

from types import ModuleType
from typing import Any

import numpy as np
import torch

from parity import bcn_case as case
from parity.allennlp_modules import executed

NAMES = (
    *("common.checks", "nn.util", "modules.encoder_base", "modules.seq2seq_encoders.seq2seq_encoder"),
    *("modules.seq2seq_encoders.pytorch_seq2seq_wrapper", "modules.feedforward", "modules.maxout"),
)
SUFFIXES = {"forward": "", "backward": "_reverse"}


class Registrable:
    """A class that others register with."""

    @classmethod
    def register(cls, name: str) -> Any:
        """Return the identity."""
        return lambda kind: kind


class Model(torch.nn.Module, Registrable):
    """AllenNLP's base of models."""

    def __init__(self, vocab: Any, regularizer: Any) -> None:
        super().__init__()
        self.vocab = vocab


class Words(torch.nn.Module):
    """A table of word vectors in the place of an embedder; AllenNLP's has `_token_embedders`."""

    def __init__(self, sizes: case.Sizes) -> None:
        super().__init__()
        self.table, self._token_embedders = torch.nn.Embedding(sizes.vocab_size, sizes.word_width), {}

    def get_output_dim(self) -> int:
        """Return the width of a vector."""
        return self.table.embedding_dim

    def forward(self, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the vectors of the words."""
        return self.table(tokens["tokens"])


class Classes:
    """A vocabulary of labels alone."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_vocab_size(self, namespace: str) -> int:
        """Return the number of classes."""
        return self.count


def load() -> dict[str, ModuleType]:
    """Return AllenNLP's modules by the last part of their names."""
    stubs: dict[str, dict[str, Any]] = {
        "allennlp.common": {"Params": None, "FromParams": object, "Registrable": Registrable},
        "allennlp.common.registrable": {"FromParams": object},
        "allennlp.nn": {
            "Activation": None,
            "InitializerApplicator": lambda: lambda model: None,
            "RegularizerApplicator": None,
        },
        "allennlp.data": {"Vocabulary": None},
        "allennlp.models.model": {"Model": Model},
        "allennlp.training.metrics": {"CategoricalAccuracy": lambda **settings: lambda *arguments: None},
    }
    found = executed(NAMES, stubs)
    kinds = {"Elmo": None, "TextFieldEmbedder": None, "FeedForward": found["feedforward"].FeedForward}
    kinds |= {"Maxout": found["maxout"].Maxout, "Seq2SeqEncoder": found["seq2seq_encoder"].Seq2SeqEncoder}
    kinds |= {"PytorchSeq2SeqWrapper": found["pytorch_seq2seq_wrapper"].PytorchSeq2SeqWrapper}
    return executed((*NAMES, "models.biattentive_classification_network"), stubs | {"allennlp.modules": kinds})


def answers(sizes: case.Sizes, tree: dict, rows: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Return the pools, the scores, the loss and its gradients, in float64. Rows of weight 0 are left out."""
    modules = load()
    d, wrapper = 2 * sizes.units, modules["pytorch_seq2seq_wrapper"].PytorchSeq2SeqWrapper

    def bilstm(inputs: int) -> torch.nn.Module:
        return wrapper(torch.nn.LSTM(inputs, sizes.units, bidirectional=True, batch_first=True))

    outputs = [size for _, size in case.maxout_sizes(sizes, 1)]
    model = (
        modules["biattentive_classification_network"]
        .BiattentiveClassificationNetwork(
            vocab=Classes(sizes.classes),
            text_field_embedder=Words(sizes),
            embedding_dropout=0.0,
            pre_encode_feedforward=modules["feedforward"].FeedForward(
                sizes.word_width, 1, [sizes.feed_forward], [torch.relu]
            ),
            encoder=bilstm(sizes.feed_forward),
            integrator=bilstm(3 * d),
            integrator_dropout=0.0,
            output_layer=modules["maxout"].Maxout(4 * d, 3, outputs, case.POOL),
            elmo=None,
        )
        .double()
    )
    places = places_of(model)
    for name, (parameter, transposed) in places.items():
        values = torch.tensor(case.to_flat(tree)[name]).double()
        parameter.data = (values.T if transposed else values).reshape(parameter.shape)
    for name, parameter in model.named_parameters():  # the second biases of the LSTMs, and that of a softmax's scores
        if "bias_hh" in name or name == "_self_attentive_pooling_projection.bias":
            torch.nn.init.zeros_(parameter)
    pools = []
    model._integrator_dropout.register_forward_hook(lambda module, given, found: pools.append(found.detach().numpy()))
    real = rows["weights"] > 0
    tokens, labels = (torch.tensor(array).long() for array in (rows["ids"][real, 0], rows["labels"][real]))
    found = model({"tokens": tokens}, labels)
    found["loss"].backward()
    forward = {"pools": pools[0], "scores": found["logits"].detach().numpy(), "loss": found["loss"].detach().numpy()}
    gradient = {name: (x.grad.T if transposed else x.grad).numpy() for name, (x, transposed) in places.items()}
    gradient["head/only/pool_kernel"] = gradient["head/only/pool_kernel"].reshape(-1)
    return {"forward": forward, "gradient": gradient}


def places_of(model: Any) -> dict[str, tuple[torch.nn.Parameter, bool]]:
    """Return the parameters by jaxlm's paths, and whether jaxlm has them transposed."""
    first = model._pre_encode_feedforward._linear_layers[0]
    found = {
        "backbone/embeddings/tokens": (model._text_field_embedder.table.weight, False),
        "backbone/embeddings/feed_forward_kernel": (first.weight, True),
        "backbone/embeddings/feed_forward_bias": (first.bias, False),
        "head/only/pool_kernel": (model._self_attentive_pooling_projection.weight, False),
    }
    for path, encoder in (("backbone/layer_0", model._encoder), ("head/only/integrator", model._integrator)):
        for way, suffix in SUFFIXES.items():
            of = f"{path}/layer_0_{way}_"
            found[f"{of}in_kernel"] = (getattr(encoder._module, f"weight_ih_l0{suffix}"), True)
            found[f"{of}state_kernel"] = (getattr(encoder._module, f"weight_hh_l0{suffix}"), True)
            found[f"{of}bias"] = (getattr(encoder._module, f"bias_ih_l0{suffix}"), False)
    for number, layer in enumerate(model._output_layer._linear_layers):
        found[f"head/maxout/kernel_{number}"] = (layer.weight, True)
        found[f"head/maxout/bias_{number}"] = (layer.bias, False)
    return found
