"""ELMo by the code of its authors: modules of AllenNLP 0.9.0 in PyTorch, and the vocabulary of bilm-tf.

`ALLENNLP` and `BILM` are directories with the sources, allenai/allennlp at v0.9.0 and allenai/bilm-tf. The modules are
executed as they are (`parity/allennlp_modules.py`). Nothing of jaxlm is imported here.
"""

import importlib.util
import json
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from parity import elmo_case as case
from parity.allennlp_modules import executed

MODULES = (
    *("common.checks", "nn.util", "modules.lstm_cell_with_projection", "modules.encoder_base", "modules.elmo_lstm"),
    *("modules.highway", "modules.scalar_mix", "modules.elmo", "modules.sampled_softmax_loss"),
)


class Marks:
    """The characters of <S> and </S> of a token of `size` characters, for allennlp's ELMoCharacterMapper."""

    def __init__(self, size: int) -> None:
        both = case.with_marks(np.zeros((0, size), np.int32)).tolist()
        self.beginning_of_sentence_characters, self.end_of_sentence_characters = both


def load(sizes: case.Sizes) -> dict[str, ModuleType]:
    """Return AllenNLP's modules by the last part of their names."""
    stubs: dict[str, dict[str, Any]] = {
        "allennlp.common": {"Params": None},
        "allennlp.common.file_utils": {"cached_path": lambda path: path},
        "allennlp.common.util": {"lazy_groups_of": None},
        "allennlp.nn.initializers": {"block_orthogonal": lambda *arguments: None},  # the parameters are given
        "allennlp.data.token_indexers.elmo_indexer": {
            "ELMoCharacterMapper": Marks(sizes.num_characters),
            "ELMoTokenCharactersIndexer": None,
        },
        "allennlp.data.dataset": {"Batch": None},
        "allennlp.data": {"Token": None, "Vocabulary": None, "Instance": None},
        "allennlp.data.fields": {"TextField": None},
    }
    return executed(MODULES, stubs)


def answers(sizes: case.Sizes, tensors: dict[str, np.ndarray], batches: list) -> dict[str, dict[str, np.ndarray]]:
    """Return what jaxlm must find: all layers of two batches with a carried state, and the gradient of the second."""
    import h5py

    modules = load(sizes)
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "options.json").write_text(json.dumps(case.options(sizes)))
        with h5py.File(f"{place}/weights.hdf5", "w") as file:
            for name, values in tensors.items():
                file[name] = values
        model = modules["elmo"]._ElmoBiLm(f"{place}/options.json", f"{place}/weights.hdf5", requires_grad=True)
    model.double()
    found: dict[str, dict[str, np.ndarray]] = {"forward": {}, "gradient": {}}
    for number, sentences in enumerate(batches):
        ids = np.zeros((len(sentences), max(map(len, sentences)), sizes.num_characters), np.int64)
        for row, sentence in enumerate(sentences):
            ids[row, : len(sentence)] = sentence + 1
        layers = torch.stack(model(torch.tensor(ids))["activations"])
        found["forward"][f"layers_{number}"] = layers.detach().numpy()
        for name, state in zip(("h", "c"), model._elmo_lstm._states, strict=True):
            found["forward"][f"{name}_{number}"] = state.numpy().copy()
    weights = case.make_weights(sizes, tuple(layers.shape), seed=3)
    (torch.tensor(weights).double() * layers).sum().backward()
    found["gradient"] = gradients(model, sizes)
    found["softmax"] = softmax(modules["sampled_softmax_loss"].SampledSoftmaxLoss)
    return found


def gradients(model: torch.nn.Module, sizes: case.Sizes) -> dict[str, np.ndarray]:
    """Return the gradients of all tensors by bilm-tf's names, the inverse of AllenNLP's loading."""
    encoder = model._token_embedder
    grad = lambda parameter: parameter.grad.numpy()  # noqa: E731
    found = {"char_embed": grad(encoder._char_embedding_weights)[1:]}
    for number, convolution in enumerate(encoder._convolutions):
        found[f"CNN/W_cnn_{number}"] = grad(convolution.weight).transpose(2, 1, 0)[None]
        found[f"CNN/b_cnn_{number}"] = grad(convolution.bias)
    for number, layer in enumerate(encoder._highways._layers):
        for gate, sign, kernel, bias in zip(
            ("transform", "carry"), (1, -1), np.split(grad(layer.weight), 2), np.split(grad(layer.bias), 2), strict=True
        ):
            found |= {f"CNN_high_{number}/W_{gate}": sign * kernel.T, f"CNN_high_{number}/b_{gate}": sign * bias}
    found |= {"CNN_proj/W_proj": grad(encoder._projection.weight).T, "CNN_proj/b_proj": grad(encoder._projection.bias)}
    for number, both in enumerate(zip(model._elmo_lstm.forward_layers, model._elmo_lstm.backward_layers, strict=True)):
        for way, lstm in enumerate(both):
            kernel = np.concatenate([grad(lstm.input_linearity.weight), grad(lstm.state_linearity.weight)], axis=1).T
            cell = f"RNN_{way}/RNN/MultiRNNCell/Cell{number}/LSTMCell"
            # The same exchange of the second and third gate goes both ways.
            found |= {f"{cell}/W_0": case._ifgo(kernel), f"{cell}/B": case._ifgo(grad(lstm.state_linearity.bias))}
            found[f"{cell}/W_P_0"] = grad(lstm.state_projection.weight).T
    return found


def softmax(kind: type) -> dict[str, np.ndarray]:
    """Return the sum of the losses over a given sample and over all ids, and their gradients."""
    sizes = case.Softmax()
    given = case.make_softmax(sizes, seed=4)
    loss = kind(sizes.vocab_size, sizes.width, len(sizes.ids))
    ids, targets = np.array(sizes.ids), given["targets"].reshape(-1)
    counts = [torch.tensor(case.expected_count(which, sizes)) for which in (targets, ids)]
    loss.log_uniform_candidate_sampler = lambda targets, choice_func: (torch.tensor(ids), *counts)
    found = {}
    for name, train in (("sampled", True), ("full", False)):
        loss.train(train)
        loss.softmax_w.data, loss.softmax_b.data = torch.tensor(given["table"]), torch.tensor(given["bias"])
        loss.double().zero_grad()
        states = torch.tensor(given["states"].reshape(-1, sizes.width)).double().requires_grad_()
        total = loss(states, torch.tensor(targets).long())
        total.backward()
        found |= {f"{name}_loss": total.detach().numpy(), f"{name}_states": states.grad.numpy()}
        found |= {f"{name}_table": loss.softmax_w.grad.numpy(), f"{name}_bias": loss.softmax_b.grad.numpy()}
    return found


def characters() -> np.ndarray:
    """Return the ids of the characters of `WORDS` by bilm-tf's vocabulary."""
    spec = importlib.util.spec_from_file_location("bilm_data", Path(os.environ["BILM"]) / "bilm" / "data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("<S>\n</S>\n<UNK>\n")
        file.flush()
        vocabulary = module.UnicodeCharsVocabulary(file.name, 50)
    return np.stack([vocabulary.word_to_char_ids(word) for word in case.WORDS])
