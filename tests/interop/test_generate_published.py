"""Generation of published models against Hugging Face's `generate`: ids and scores of searches and of greedy decoding.

All prompts, of different lengths, are one batch here and one at a time there. The frozen twin in tests/golden runs
without PyTorch.
"""

import json
from pathlib import Path

import pytest
from parity import generate_case
from parity import published_case as case
from safetensors.numpy import save_file

from jaxlm.inference.decoding import CachedModel, Prompt
from jaxlm.inference.strategies import ENDED, BeamSearch, Sampler, Sampling
from jaxlm.interop.sources import read_published
from jaxlm.models import build
from jaxlm.nn.config import Execution

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
WHY = "needs PyTorch and transformers, the extra [parity]; the frozen twin in tests/golden runs without"


@pytest.fixture(scope="module", params=case.DECODERS)
def published(request, tmp_path_factory):
    """The name of a decoder, and the decoder with a position table that has room for the continuations."""
    directory = tmp_path_factory.mktemp(request.param)
    listed = json.loads((GOLDEN / "published.json").read_text())[request.param]
    (directory / "config.json").write_text(json.dumps(listed["config"] | {"n_positions": case.LONG.positions}))
    tensors = {
        key: generate_case.tensor(
            key, [case.LONG.positions, shape[1]] if "positions_embed" in key or "wpe" in key else shape
        )
        for key, shape in listed["tensors"].items()
    }
    save_file(tensors, directory / "model.safetensors")
    return request.param, read_published(f"hf:{directory}")


def generated(name: str, model, settings: dict) -> list[list[dict]]:
    """The sequences of each prompt, as `published_torch.generated` has them."""
    cached = CachedModel(
        build(model.model, Execution(dtype="float32")),
        model.params,
        end=generate_case.END[name],
        repetition_penalty=settings.get("repetition_penalty", 1.0),
        min_length=settings.get("min_new_tokens", 0),
    )
    prompts = [Prompt(prompt, generate_case.NEW) for prompt in generate_case.prompts()]
    if settings["num_beams"] == 1:
        rows_SB = [row[:, 0].tolist() for row in Sampler(cached, Sampling(temperature=0.0))(prompts)]
        rows = [[i for i in row if i != ENDED] for row in zip(*rows_SB, strict=True)]
        return [[{"ids": row, "score": None}] for row in rows]
    search = BeamSearch(cached, settings["num_beams"], length_penalty=settings.get("length_penalty", 1.0))
    return [[{"ids": best.tokens, "score": best.score} for best in found] for found in search(prompts)]


def assert_equal(found: list[list[dict]], wanted: list[list[dict]]) -> None:
    assert [[one["ids"] for one in rows] for rows in found] == [[one["ids"] for one in rows] for rows in wanted]
    for ours, theirs in zip(sum(found, []), sum(wanted, []), strict=True):
        assert ours["score"] == (None if theirs["score"] is None else pytest.approx(theirs["score"], rel=1e-5))


@pytest.mark.parametrize("title", generate_case.SETTINGS)
def test_sequences_are_hugging_faces(published, title):
    """Fails when a cache follows another beam, a finished hypothesis is dropped or scored at another length, a penalty
    misses the prompt or counts an id twice, or the padding of a shorter prompt is read."""
    name, model = published
    wanted = json.loads((GOLDEN / "generated.json").read_text())[name][title]
    assert_equal(generated(name, model, generate_case.SETTINGS[title]), wanted)


@pytest.mark.parity
@pytest.mark.parametrize("name", case.DECODERS)
def test_sequences_live(name):
    """Fails when the frozen sequences are not those of the library that is installed."""
    pytest.importorskip("torch", reason=WHY)
    pytest.importorskip("transformers", reason=WHY)
    from parity import published_torch

    frozen = json.loads((GOLDEN / "generated.json").read_text())[name]
    for title, found in published_torch.generated(name).items():
        assert_equal(found, frozen[title])
