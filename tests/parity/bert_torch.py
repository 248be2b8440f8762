"""Hugging Face's BERT classes and torch.nn.LSTM on the cases of `bert_case`, float64. Nothing of jaxlm is imported."""

import math

import numpy as np
import torch
import transformers

from parity import bert_adam
from parity import bert_case as case

HEADS = {
    "classification": ("BertForSequenceClassification", "classifier"),
    "regression": ("BertForSequenceClassification", "classifier"),
    "choice": ("BertForMultipleChoice", "classifier"),
    "span": ("BertForQuestionAnswering", "qa_outputs"),
    "tagging": ("BertForTokenClassification", "classifier"),
}


def model_of(name: str, sizes: case.Sizes, flat: dict[str, np.ndarray], **settings):
    """A transformers class with these weights, float64, without dropout."""
    config = transformers.BertConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        intermediate_size=sizes.feed_forward_width,
        max_position_embeddings=sizes.num_positions,
        hidden_act={"gelu_tanh": "gelu_pytorch_tanh", "gelu_erf": "gelu"}[sizes.activation],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
        **settings,
    )
    model = getattr(transformers, name)(config).double()
    result = model.load_state_dict({key: torch.tensor(value) for key, value in flat.items()}, strict=False)
    tied = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
    assert all(key in tied for key in result.missing_keys), result.missing_keys
    assert all(key.startswith("bert.pooler") for key in result.unexpected_keys), result.unexpected_keys
    model.tie_weights()
    return model


def gradients(model) -> dict[str, np.ndarray]:
    """By name; 0 where a parameter has none."""
    named = dict(model.named_parameters())
    return {name: np.zeros(x.shape) if x.grad is None else x.grad.numpy() for name, x in named.items()}


def pretraining_loss(model, batch: dict[str, np.ndarray]):
    """MLM + NSP on masks that are given."""
    tensor = lambda name: torch.tensor(batch[name]).long()  # noqa: E731
    return model(
        input_ids=tensor("seen"),
        token_type_ids=tensor("types"),
        attention_mask=tensor("segments"),
        labels=tensor("targets"),
        next_sentence_label=tensor("next_labels")[:, 0],
        output_hidden_states=True,
    )


def forward(sizes: case.Sizes, flat: dict, batch: dict) -> dict[str, np.ndarray]:
    """All layers' states (N + 1, B, P, D), pooled states, and both terms of the loss."""
    model = model_of("BertForPreTraining", sizes, flat)
    with torch.no_grad():
        out = pretraining_loss(model, batch)
        pooled = model.bert.pooler(out.hidden_states[-1])
        entropy = torch.nn.functional.cross_entropy
        masked = entropy(out.prediction_logits.flatten(0, 1), torch.tensor(batch["targets"]).long().flatten())
        following = entropy(out.seq_relationship_logits, torch.tensor(batch["next_labels"]).long()[:, 0])
    assert abs(float(out.loss - masked - following)) < 1e-12
    return {
        "hidden": torch.stack(out.hidden_states).numpy(),
        "pooled": pooled.numpy(),
        "masked_lm_loss": masked.numpy(),
        "next_sentence_loss": following.numpy(),
    }


def gradient(sizes: case.Sizes, flat: dict, batch: dict) -> dict[str, np.ndarray]:
    """Of the sum of both terms."""
    model = model_of("BertForPreTraining", sizes, flat)
    pretraining_loss(model, batch).loss.backward()
    return gradients(model)


def adamw_steps(sizes: case.Sizes, flat: dict, batch: dict) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and parameters of NUM_STEPS steps of torch.optim.AdamW: clip, warmup, linear to 0."""
    model = model_of("BertForPreTraining", sizes, flat)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [x for name, x in named.items() if case.decayed(name)], "weight_decay": case.WEIGHT_DECAY},
            {"params": [x for name, x in named.items() if not case.decayed(name)], "weight_decay": 0.0},
        ],
        betas=(case.BETA1, case.BETA2),
        eps=case.EPS,
    )
    losses = []
    for t in range(case.NUM_STEPS):
        optimizer.zero_grad()
        loss = pretraining_loss(model, batch).loss
        loss.backward()
        losses.append(float(loss.detach()))
        size = math.sqrt(sum(float((x.grad**2).sum()) for x in named.values()))
        for x in named.values():
            x.grad *= min(1.0, case.CLIP_NORM / size)
        rise = (t + 1) / case.WARMUP_STEPS
        fall = 1 - (t - case.WARMUP_STEPS) / (case.NUM_STEPS - case.WARMUP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = case.PEAK_LR * (rise if t < case.WARMUP_STEPS else fall)
        optimizer.step()
    return losses, {name: x.detach().numpy() for name, x in named.items()}


def bert_adamw_steps(sizes: case.Sizes, flat: dict, batch: dict) -> dict[str, np.ndarray]:
    """Parameters after NUM_STEPS of the original's optimizer."""
    return bert_adam.run(
        flat,
        lambda p: gradient(sizes, p, batch),
        case.decayed,
        num_steps=case.NUM_STEPS,
        peak_lr=case.PEAK_LR,
        warmup_steps=case.WARMUP_STEPS,
        b1=case.BETA1,
        b2=case.BETA2,
        eps=case.EPS,
        weight_decay=case.WEIGHT_DECAY,
        clip_norm=case.CLIP_NORM,
    )


def task(sizes: case.Sizes, flat: dict, kind: str, batch: dict, head: dict) -> dict[str, np.ndarray]:
    """Scores, loss, and the gradients of the head and of two tables of the encoder."""
    name, at = HEADS[kind]
    body = {key: value for key, value in flat.items() if key.startswith("bert.")}
    body |= {f"{at}.weight": np.float64(head["kernel"]).T, f"{at}.bias": np.float64(head["bias"])}
    settings = {"num_labels": case.TASKS[kind], "problem_type": "regression"} if kind == "regression" else {}
    settings = settings or ({} if kind == "choice" else {"num_labels": case.TASKS[kind]})
    model = model_of(name, sizes, body, **settings)
    index = np.arange(sizes.num_positions)
    real = index < batch["lengths"][..., None]
    inputs = {
        "input_ids": batch["ids"],
        "attention_mask": real,
        "token_type_ids": real & (index >= batch["second"][..., None]),
    }
    if kind != "choice":
        inputs = {key: value[:, 0] for key, value in inputs.items()}
    tensors = {key: torch.tensor(value.astype(np.int64)) for key, value in inputs.items()}
    labels = torch.tensor(batch["labels"])
    if kind == "span":
        out = model(**tensors, start_positions=labels[:, 0].long(), end_positions=labels[:, 1].long())
        scores = torch.stack([out.start_logits, out.end_logits], -1)
    elif kind == "regression":
        out = model(**tensors, labels=labels.double())
        scores = out.logits
    else:
        out = model(**tensors, labels=torch.where(labels < 0, -100, labels).long())
        scores = out.logits
    out.loss.backward()
    found = gradients(model)
    return {
        "scores": scores.detach().numpy(),
        "loss": out.loss.detach().numpy(),
        "kernel": found[f"{at}.weight"].T,
        "bias": found[f"{at}.bias"],
        "types": found["bert.embeddings.token_type_embeddings.weight"],
        "tokens": found["bert.embeddings.word_embeddings.weight"],
    }


def lstm(made: dict) -> dict[str, np.ndarray]:
    """Outputs of torch.nn.LSTM, both directions, on sequences of different lengths, and gradients."""
    params, x = made["params"], torch.tensor(made["x"], dtype=torch.float64, requires_grad=True)
    units = params["layer_0_forward_bias"].shape[0] // 4
    layers = sum(name.endswith("forward_bias") for name in params)
    model = torch.nn.LSTM(x.shape[-1], units, layers, batch_first=True, bidirectional=True).double()
    ends = {"in_kernel": "weight_ih", "state_kernel": "weight_hh", "bias": "bias_ih"}
    names = {}
    for layer in range(layers):
        for way, end in (("forward", ""), ("backward", "_reverse")):
            for ours, theirs in ends.items():
                names[f"layer_{layer}_{way}_{ours}"] = f"{theirs}_l{layer}{end}"
    weights = {names[name]: torch.tensor(np.float64(value).T) for name, value in params.items()}
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.startswith("bias_hh"):
                value.zero_()
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        x, torch.tensor(made["lengths"]).long(), batch_first=True, enforce_sorted=False
    )
    y, _ = torch.nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True, total_length=x.shape[1])
    (y * torch.tensor(made["cotangent"])).sum().backward()
    theirs = dict(model.named_parameters())
    found = {f"d_{ours}": theirs[name].grad.numpy().T for ours, name in names.items()}
    return found | {"y": y.detach().numpy(), "d_x": x.grad.numpy()}
