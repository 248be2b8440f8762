"""The models of `published_case` in PyTorch: their files, what they give, and a gradient."""

from pathlib import Path

import numpy as np
import torch
import transformers

from parity import generate_case
from parity import published_case as case

# Our names for what a model of Hugging Face calls its outputs.
OUTPUTS = {
    "logits": "logits",
    "prediction_logits": "logits",
    "seq_relationship_logits": "next_sentence_logits",
    "pooler_output": "pooled",
}


def model(name: str, sizes: case.Sizes, tensor=case.tensor) -> torch.nn.Module:
    """The model, its numbers drawn by name."""
    kind, _ = case.CASES[name]
    cls = getattr(transformers, kind)
    found = cls(cls.config_class(**case.settings(name, sizes))).eval()
    with torch.no_grad():
        for key, parameter in found.named_parameters():
            parameter.copy_(torch.from_numpy(tensor(key, list(parameter.shape))))
    found.tie_weights()
    return found


def save(name: str, sizes: case.Sizes, directory: Path) -> None:
    """The model's directory, as the library writes it."""
    model(name, sizes).save_pretrained(directory)


def outputs_of(found: torch.nn.Module, kind: str, ids: list[int], segments: list[int]):
    """What the library's model gives for a row, and its outputs by our names."""
    inputs = {"input_ids": torch.tensor([ids])}
    if kind.startswith("Bert"):
        inputs["token_type_ids"] = torch.tensor([segments])
    if "MultipleChoice" in kind:
        inputs = {key: value[None] for key, value in inputs.items()}
    given = found(**inputs, output_hidden_states=True)
    outputs = {ours: given[theirs][0] for theirs, ours in OUTPUTS.items() if given.get(theirs) is not None}
    if "start_logits" in given:
        outputs["logits"] = torch.stack([given["start_logits"][0], given["end_logits"][0]], dim=-1)
    return given, outputs


def answers(name: str, sizes: case.Sizes) -> dict[str, np.ndarray]:
    """`hidden_0/0` … (layer and row), logits by row, and `gradient/TENSOR` of their weighted sum over all rows."""
    found = model(name, sizes)
    kind, _ = case.CASES[name]
    arrays: dict[str, np.ndarray] = {}
    total = torch.zeros(())
    for row, (ids, segments) in enumerate(zip(*case.rows(sizes), strict=True)):
        given, outputs = outputs_of(found, kind, ids, segments)
        for layer, states in enumerate(given.hidden_states):
            arrays[f"hidden_{layer}/{row}"] = states[0].detach().numpy()
        for key, value in outputs.items():
            arrays[f"{key}/{row}"] = value.detach().numpy()
            total = total + (value * torch.from_numpy(case.weights(f"{key}/{row}", tuple(value.shape)))).sum()
    total.backward()
    for key, parameter in found.named_parameters():
        gradient = parameter.grad
        arrays[f"gradient/{key}"] = np.zeros(parameter.shape) if gradient is None else gradient.numpy()
    return arrays


def greedy(name: str) -> np.ndarray:
    """The 64 ids that `generate` finds for each prompt, one after the other."""
    found = model(name, case.LONG)
    rows = []
    for prompt in case.prompts():
        ids = torch.tensor([prompt])
        made = found.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=64,
            min_new_tokens=64,
            pad_token_id=0,
        )
        rows.append(made[0, len(prompt) :].numpy())
    return np.stack(rows)


def losses(name: str, sizes: case.Sizes) -> np.ndarray:
    """The loss before each of 20 steps of PyTorch's AdamW: matrices and tables decayed, the gradient's norm clipped."""
    found = model(name, sizes)
    kind, _ = case.CASES[name]
    matrices = [p for p in found.parameters() if p.ndim > 1]
    vectors = [p for p in found.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": case.STEPS["decay"]}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=sizes.rate, eps=case.STEPS["eps"])
    seen = []
    for _ in range(int(case.STEPS["steps"])):
        loss = torch.zeros(())
        for row, (ids, segments) in enumerate(zip(*case.rows(sizes), strict=True)):
            for key, value in outputs_of(found, kind, ids, segments)[1].items():
                wanted = torch.from_numpy(case.target(f"{key}/{row}", tuple(value.shape)))
                if key == "pooled":
                    continue
                if value.shape[-1] == 1:
                    loss = loss + ((value - wanted) ** 2).mean()
                else:
                    flat = value.reshape(-1, value.shape[-1])
                    loss = loss + torch.nn.functional.cross_entropy(flat, wanted.reshape(-1))
        seen.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(found.parameters(), case.STEPS["clip"])
        optimizer.step()
    return np.array(seen)


def generated(name: str) -> dict[str, list[list[dict]]]:
    """For each of `generate_case.SETTINGS` the sequences of each prompt, the best first: new ids, and beams' scores."""
    found = model(name, case.LONG, generate_case.tensor)
    threads, end = torch.get_num_threads(), generate_case.END[name]
    torch.set_num_threads(1)  # the steps are too small for several
    try:
        return {
            title: [_searched(found, prompt, end, settings) for prompt in generate_case.prompts()]
            for title, settings in generate_case.SETTINGS.items()
        }
    finally:
        torch.set_num_threads(threads)


def _searched(found: torch.nn.Module, prompt: list[int], end: int, settings: dict) -> list[dict]:
    ids = torch.tensor([prompt])
    made = found.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=generate_case.NEW,
        eos_token_id=end,
        pad_token_id=0,
        num_return_sequences=settings["num_beams"],
        early_stopping=False,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    rows = made.sequences[:, len(prompt) :].tolist()
    scores = made.sequences_scores.tolist() if settings["num_beams"] > 1 else [None]
    return [{"ids": _to_end(row, end), "score": score} for row, score in zip(rows, scores, strict=True)]


def _to_end(row: list[int], end: int) -> list[int]:
    """The ids up to the one that ends a text; padding follows it."""
    return row[: row.index(end) + 1] if end in row else row
