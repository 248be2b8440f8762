"""The precision of products in float32, which GPUs and TPUs lower unless they are told not to."""

import jax
from toy import TOY

from jaxlm.inference import token_outputs


def test_activations_are_computed_in_full_float32(monkeypatch):
    """Fails when the arrays that are compared with another program come from TF32, as on GPUs by default."""
    seen = []

    def outputs(model, params, kind, ids_BL, seen_BL, types_BL):
        seen.append(jax.config.jax_default_matmul_precision)
        return {"hidden_0": ids_BL}

    monkeypatch.setattr(token_outputs, "model_outputs", outputs)
    token_outputs.activations(TOY, {}, None, token_outputs.IdRows([[1, 2]], None))
    assert seen == ["highest"]
    assert jax.config.jax_default_matmul_precision is None, "training keeps JAX's default"
