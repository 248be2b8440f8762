"""The MT-LSTM by the code of its authors, the fork of OpenNMT-py in salesforce/cove.

`COVE` is a directory with its sources. `onmt/Models.py`, `onmt/modules/GlobalAttention.py` and `onmt/Optim.py` are
executed as they are, with two names of the PyTorch of their time. The mask of the attention is set with their own
`applyMask`, which their training does not call. Of PyTorch's two biases the second is 0 and stays so. Nothing of jaxlm
is imported here.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from parity import mt_lstm_case as case

OTHER_BIAS = "bias_hh"


def load() -> SimpleNamespace:
    """Return the original classes: Encoder, Decoder, NMTModel and Optim."""
    root = Path(os.environ["COVE"]) / "OpenNMT-py" / "onmt"
    # As in PyTorch 0.2: the function's name, and `t`, which exchanged the first two axes of any tensor.
    torch.nn.utils.clip_grad_norm = torch.nn.utils.clip_grad_norm_
    torch.Tensor.t = lambda tensor: tensor.transpose(0, 1)
    onmt, modules = ModuleType("onmt"), ModuleType("onmt.modules")
    onmt.modules, onmt.Constants = modules, SimpleNamespace(PAD=case.PAD)
    sys.modules |= {"onmt": onmt, "onmt.modules": modules}
    found: dict[str, Any] = {}
    for name in ("modules/GlobalAttention", "Models", "Optim"):
        spec = importlib.util.spec_from_file_location(name, root / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found |= vars(module)
        modules.GlobalAttention = found["GlobalAttention"]
    return SimpleNamespace(**{name: found[name] for name in ("Encoder", "Decoder", "NMTModel", "Optim")})


def keys(sizes: case.Sizes) -> dict[str, tuple[str, bool]]:
    """Return for each key of the original the path of ours, and True if it is transposed."""
    table = {"encoder": "source", "decoder": "target"}
    found = {f"{side}.word_lut.weight": (f"backbone/embeddings/{of}_tokens", False) for side, of in table.items()}
    found["decoder.attn.linear_in.weight"] = ("backbone/attention/in_kernel", False)
    found["decoder.attn.linear_out.weight"] = ("backbone/attention/out_kernel", True)
    found["generator.0.weight"] = ("head/classifier/kernel", False)
    found["generator.0.bias"] = ("head/classifier/bias", False)
    names = {"weight_ih": ("in_kernel", True), "weight_hh": ("state_kernel", True), "bias_ih": ("bias", False)}
    for number in range(sizes.num_layers):
        for theirs, (ours, transposed) in names.items():
            for suffix, way in (("", "forward"), ("_reverse", "backward")):
                path = f"backbone/layer_{number}/{way}/{ours}"
                found[f"encoder.rnn.{theirs}_l{number}{suffix}"] = (path, transposed)
            path = f"backbone/layer_{number}/decoder/{ours}"
            found[f"decoder.rnn.layers.{number}.{theirs}"] = (path, transposed)
    return found


def model_of(original: SimpleNamespace, sizes: case.Sizes, flat: dict[str, np.ndarray]) -> torch.nn.Module:
    """Return the original model with these parameters, in float64."""
    options = SimpleNamespace(
        layers=sizes.num_layers,
        rnn_size=sizes.width,
        word_vec_size=sizes.word_width,
        brnn=True,
        dropout=0.0,
        dot=False,
        input_feed=1,
        fix_embed=False,
    )
    vocabulary = SimpleNamespace(size=lambda: sizes.vocab_size)
    model = original.NMTModel(original.Encoder(options, vocabulary), original.Decoder(options, vocabulary))
    model.generator = torch.nn.Sequential(torch.nn.Linear(sizes.width, sizes.vocab_size), torch.nn.LogSoftmax(dim=-1))
    state = model.double().state_dict()
    for name in state:
        if OTHER_BIAS in name:
            state[name] = torch.zeros_like(state[name])
            continue
        path, transposed = keys(sizes)[name]
        leaf = torch.tensor(np.float64(flat[path]))
        state[name] = leaf.T if transposed else leaf
    model.load_state_dict(state)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(OTHER_BIAS not in name)
    return model


def outputs(model: torch.nn.Module, rows: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities (L, B, V) and the summed loss of the targets over the number of rows."""
    source, target = (torch.tensor(rows[name]).long().T for name in ("source", "target"))
    model.decoder.attn.applyMask(source.T == case.PAD)
    states = model(((source, rows["source_lengths"].tolist()), target))
    scores = model.generator(states)
    criterion = torch.nn.NLLLoss(torch.tensor([0.0] + [1.0] * (scores.shape[2] - 1)).double(), reduction="sum")
    loss = criterion(scores.reshape(-1, scores.shape[2]), target[1:].reshape(-1))
    return scores, loss / target.shape[1]


def ours(sizes: case.Sizes, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return parameters or gradients of the original by our paths."""
    found = {}
    for name, (path, transposed) in keys(sizes).items():
        found[path] = (tensors[name].T if transposed else tensors[name]).detach().numpy().copy()
    return found


def answers(sizes: case.Sizes, tree: dict, rows: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Return what jaxlm must find: encoder states, log-probabilities, loss, gradients, and parameters after steps."""
    original = load()
    model = model_of(original, sizes, case.to_flat(tree))
    encoded = model.encoder((torch.tensor(rows["source"]).long().T, rows["source_lengths"].tolist()))[1]
    scores, loss = outputs(model, rows)
    loss.backward()
    found = {
        "forward": {
            "encoder": encoded.transpose(0, 1).detach().numpy(),
            "scores": scores.transpose(0, 1).detach().numpy(),
            "loss": np.array(loss.item()),
        },
        "gradient": ours(sizes, {name: parameter.grad for name, parameter in model.named_parameters()}),
    }
    optimizer = original.Optim("sgd", case.LEARNING_RATE, case.CLIP_NORM)
    optimizer.set_parameters(parameter for parameter in model.parameters() if parameter.requires_grad)
    for _ in range(case.STEPS):
        model.zero_grad()
        outputs(model, rows)[1].backward()
        optimizer.step()
    return found | {"steps": ours(sizes, dict(model.named_parameters()))}


def halvings() -> np.ndarray:
    """Return the learning rates of the original after evaluations with `PERPLEXITIES`."""
    optimizer, found = load().Optim("sgd", 1.0, 5, lr_decay=0.5, start_decay_at=1000), []
    optimizer.set_parameters([torch.nn.Parameter(torch.zeros(1))])
    for epoch, perplexity in enumerate(case.PERPLEXITIES, start=1):
        optimizer.updateLearningRate(perplexity, epoch)
        found.append(optimizer.optimizer.param_groups[0]["lr"])
    return np.array(found)
