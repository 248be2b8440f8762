"""CoVe's encoder by torch.nn.LSTM in float64, packed by length as salesforce/cove does (cove/encoder.py:58-96).

Nothing of jaxlm is imported here.
"""

import numpy as np
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from parity import cove_case as case


def states(num_layers: int) -> np.ndarray:
    """Return the states of the sentences after the first `num_layers` layers (B, L, 2 U), zeros at padding."""
    network = torch.nn.LSTM(
        case.WIDTH, case.UNITS, num_layers=num_layers, bidirectional=True, batch_first=True, dtype=torch.float64
    )
    tensors = case.make_tensors()
    network.load_state_dict({name: torch.tensor(np.float64(tensors[name])) for name in network.state_dict()})
    rows, lengths = case.make_rows()
    packed = pack_padded_sequence(
        torch.tensor(np.float64(rows)), torch.tensor(lengths), batch_first=True, enforce_sorted=False
    )
    with torch.no_grad():
        found, _ = pad_packed_sequence(network(packed)[0], batch_first=True)
    return found.numpy()


def answers() -> dict[str, dict[str, np.ndarray]]:
    """Return what jaxlm must find."""
    return {"states": {f"layer_{layer}": states(layer) for layer in range(1, case.LAYERS + 1)}}
