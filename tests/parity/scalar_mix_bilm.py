"""The mix of layers by the code of ELMo's authors, `weight_layers` in bilm/elmo.py of allenai/bilm-tf, in TensorFlow.

`BILM` is a directory with the source, which is executed as it is with TensorFlow's functions of version 1. Nothing of
jaxlm is imported here.
"""

import os
import sys
from pathlib import Path

import numpy as np
import tensorflow

from parity import scalar_mix_case as case


def answers(given: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Return the mixes with and without the norm, the penalty, and the gradients of the mix with the norm."""
    tf = tensorflow.compat.v1
    tf.disable_v2_behavior()
    before, sys.modules["tensorflow"] = sys.modules["tensorflow"], tf
    members: dict = {}
    try:
        file = Path(os.environ["BILM"]) / "bilm" / "elmo.py"
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), members)
    finally:
        sys.modules["tensorflow"] = before
    found = {}
    for name, norm in (("plain", False), ("normed", True)):
        with tf.Graph().as_default(), tf.Session() as session:
            layers = tf.constant(np.swapaxes(given["layers"], 0, 1))
            ops = {"lm_embeddings": layers, "mask": tf.constant(given["mask"])}
            mixed = members["weight_layers"]("mix", ops, l2_coef=case.PENALTY, do_layer_norm=norm)
            session.run(tf.global_variables_initializer())
            weights, gamma = tf.trainable_variables()
            session.run([weights.assign(given["weights"]), gamma.assign([given["gamma"]])])
            output = mixed["weighted_op"]
            loss = tf.reduce_sum(output * given["factors"]) + tf.add_n(mixed["regularization_op"])
            wanted = {"output": output, "penalty": mixed["regularization_op"][0]}
            of_weights, of_gamma, of_layers = tf.gradients(loss, [weights, gamma, layers])
            wanted |= {"weights": of_weights, "gamma": of_gamma[0], "layers": tf.transpose(of_layers, [1, 0, 2, 3])}
            found[name] = session.run(wanted)
    return found
