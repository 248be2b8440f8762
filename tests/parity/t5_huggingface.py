"""Hugging Face's T5ForConditionalGeneration with the parameters of a case, run as it is in float64."""

from typing import Any

import numpy as np
import torch
import transformers

from parity import t5_case as case


def model_of(sizes: case.Sizes, flat: dict[str, np.ndarray]) -> Any:
    """Return the model in evaluation mode, with exactly these parameters.

    The library ties the output of a model that is made from a config alone, so the output is untied here where the case
    has one.
    """
    gated = sizes.feed_forward == "geglu"
    config = transformers.T5Config(
        vocab_size=sizes.vocab_size,
        d_model=sizes.width,
        d_kv=sizes.head_width,
        d_ff=sizes.feed_forward_width,
        num_layers=sizes.num_encoder_layers,
        num_decoder_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        relative_attention_num_buckets=sizes.num_buckets,
        relative_attention_max_distance=sizes.max_distance,
        feed_forward_proj="gated-gelu" if gated else "relu",
        scale_decoder_outputs=sizes.scaled_output,
        decoder_start_token_id=case.PAD,
        pad_token_id=case.PAD,
        eos_token_id=case.END,
    )
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    if sizes.output == "untied":
        model.lm_head.weight = torch.nn.Parameter(torch.empty(sizes.vocab_size, sizes.width, dtype=torch.float64))
    state = {name: torch.tensor(value, dtype=torch.float64) for name, value in flat.items()}
    aliases = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    tied = {
        name: state["shared.weight"] for name in (*aliases, *(() if "lm_head.weight" in state else ["lm_head.weight"]))
    }
    model.load_state_dict(state | tied, strict=True)
    return model


def outputs(model: Any, rows: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits (B, L, V), zero at padding, and the mean loss of the targets with weight 1."""
    real = torch.tensor(rows["weights"], dtype=torch.float64)
    targets = torch.tensor(rows["targets"]).long()
    found = model(
        input_ids=torch.tensor(rows["source"]).long(),
        attention_mask=torch.tensor(rows["source_segments"]).long(),
        decoder_input_ids=torch.tensor(rows["ids"]).long(),
    )
    nll = torch.nn.functional.cross_entropy(found.logits.transpose(1, 2), targets, reduction="none")
    return found.logits * real[..., None], (nll * real).sum() / real.sum()


def gradient(model: Any, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the gradient of the mean loss by Hugging Face's names."""
    model.zero_grad()
    outputs(model, rows)[1].backward()
    return {name: value.grad.numpy() for name, value in model.named_parameters()}


def generated(model: Any, rows: dict[str, np.ndarray], length: int, beams: int) -> np.ndarray:
    """Return the ids that follow the start id, (B, length), padded after the end."""
    deeper = model.config.num_decoder_layers > model.config.num_layers
    found = model.generate(
        input_ids=torch.tensor(rows["source"]).long(),
        attention_mask=torch.tensor(rows["source_segments"]).long(),
        max_new_tokens=length,
        num_beams=beams,
        do_sample=False,
        use_cache=not deeper,  # with a cache the library fails for a decoder that is deeper than the encoder
    )[:, 1:].numpy()
    return np.pad(found, ((0, 0), (0, length - found.shape[1])))
