"""Zero-shot tasks of a random GPT-2 against transformers and PyTorch, on rows of the real data sets."""

import json
import math
import re
import shutil

import pytest
from toy_runs import run_here

pytestmark = [pytest.mark.parity, pytest.mark.data, pytest.mark.slow]


@pytest.fixture(scope="module")
def peer(tmp_path_factory, data_directory):
    """(directory, (text, first token scored, ids in front) -> (log-probabilities of the tokens, greedy or not))."""
    torch = pytest.importorskip("torch", reason="needs the extra [parity]")
    transformers = pytest.importorskip("transformers", reason="needs the extra [parity]")
    directory = tmp_path_factory.mktemp("gpt2")
    vocabulary = data_directory / "vocab" / "gpt2"
    shutil.copy(vocabulary / "encoder.json", directory / "vocab.json")
    shutil.copy(vocabulary / "vocab.bpe", directory / "merges.txt")
    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_embd": 60, "n_head": 5, "n_positions": 300, "initializer_range": 0.2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    model.save_pretrained(directory)
    tokenizer = transformers.GPT2TokenizerFast(str(directory / "vocab.json"), str(directory / "merges.txt"))
    tokenizer.save_pretrained(directory)

    def scores(ids):
        with torch.no_grad():
            table = torch.log_softmax(model(torch.tensor([ids[:-1]])).logits[0].double(), -1)
        right = torch.tensor(ids[1:])
        return table.gather(-1, right[:, None])[:, 0], table.argmax(-1) == right

    scores.encode = lambda text: tokenizer(text)["input_ids"]
    scores.end = tokenizer.eos_token_id
    return directory, scores


def evaluate(directory, *tasks, more=()):
    words = [word for task in tasks for word in ("--task", task)]
    ended = run_here("evaluate", "zero-shot", "--run", f"hf:{directory}", *words, *more)
    assert ended.code == 0, ended.errors
    return [json.loads(line) for line in ended.output.splitlines()]


def value(lines, **fields):
    (found,) = [line for line in lines if all(line.get(name) == wanted for name, wanted in fields.items())]
    return found["value"]


def loss_in_windows(scores, ids, length):
    """The loss of all tokens but the first, `length` at a time; the window of the last ones has `length` inputs too."""
    loss = 0.0
    for at in range(1, len(ids), length):
        end = min(at + length, len(ids))
        begin = max(0, end - 1 - length)
        loss -= float(scores(ids[begin:end])[0][at - begin - 1 :].sum())
    return loss


def test_lambada(peer, data_directory, tmp_path):
    """Fails when another token than the last one by transformers is scored."""
    directory, scores = peer
    rows = (data_directory / "zeroshot" / "lambada_test.jsonl").read_text().splitlines()[:60]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    lines = evaluate(directory, f"lambada:{tmp_path}/rows.jsonl")
    losses, hits = [], []
    for row in rows:
        log_probs, greedy = scores(scores.encode(json.loads(row)["text"]))
        losses.append(-float(log_probs[-1]))
        hits.append(bool(greedy[-1]))
    assert value(lines, metric="perplexity") == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert value(lines, metric="accuracy") == pytest.approx(sum(hits) / len(hits))


def test_minimal_pairs(peer, data_directory, tmp_path):
    """Fails when --left-context changes more than the end-of-text token and the first token."""
    directory, scores = peer
    rows = (data_directory / "zeroshot" / "blimp" / "anaphor_number_agreement.jsonl").read_text().splitlines()[:60]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    for more, before in (((), []), (("--left-context",), [scores.end])):
        lines = evaluate(directory, f"blimp:{tmp_path}/rows.jsonl", more=more)
        for metric in ("accuracy_sum", "accuracy_mean"):
            right = []
            for row in map(json.loads, rows):
                texts = (row["sentence_good"], row["sentence_bad"])
                found = [scores([*before, *scores.encode(text)])[0] for text in texts]
                good, bad = (float(one.sum() if metric == "accuracy_sum" else one.mean()) for one in found)
                right.append(good > bad)
            paradigm = "anaphor_number_agreement"
            found = value(lines, metric=metric, paradigm=paradigm)
            assert found == pytest.approx(sum(right) / len(right))


def test_winograd(peer, data_directory, tmp_path):
    """Fails when the substituted candidate is scored in partial scoring, or blanks around it differ."""
    directory, scores = peer
    text = (data_directory / "zeroshot" / "winograd" / "wsc273.txt").read_text()
    blocks = [block.splitlines() for block in text.strip().split("\n\n")][:40]
    (tmp_path / "wsc.txt").write_text("\n\n".join("\n".join(block) for block in blocks) + "\n")
    lines = evaluate(directory, f"wsc273:{tmp_path}/wsc.txt")
    right = {"accuracy_full": 0, "accuracy_partial": 0}
    for sentence, _, candidates, answer in blocks:
        before, after = (" ".join(part.split()) for part in sentence.split("[MASK]"))
        totals = {"accuracy_full": [], "accuracy_partial": []}
        names = [name.strip() for name in candidates.split(",")]
        for name in names:
            first, _, rest = name.partition(" ")
            inside = first.lower() + " " + rest if rest and first in ("The", "A", "An", "His", "Her") else name
            start = f"{before} {inside if before and before[-1] not in '.!?' else name}".strip()
            whole = start + ("" if after[0] in ".,;:!?'" else " ") + after
            log_probs, _ = scores(scores.encode(whole))
            totals["accuracy_full"].append(float(log_probs.sum()))
            totals["accuracy_partial"].append(float(log_probs[len(scores.encode(start)) - 1 :].sum()))
        for metric, found in totals.items():
            right[metric] += names[found.index(max(found))] == answer.strip()
    for metric, count in right.items():
        assert value(lines, metric=metric) == pytest.approx(count / len(blocks))


def test_wikitext(peer, data_directory, tmp_path):
    """Fails when a window scores a token twice or not at all, when the text differs from that without WikiText's
    blanks, or when the units are counted after the detokenizer.
    """
    directory, scores = peer
    book = next((data_directory / "books" / "test").glob("*.txt")).read_text()
    sentences = re.findall(r"(?<=[.] )[A-Z][a-z]+(?:,? [a-z]+){6,30}[.](?= )", " ".join(book.split()))[:60]
    pages = [[" ".join(sentences[at : at + 10]) for at in (first, first + 10, first + 20)] for first in (0, 30)]

    def wiki(paragraph):
        return re.sub(r"([,.])", r" \1", paragraph)

    names = ("Hill", "Tree")
    parts = [
        f" = {name} = \n \n" + "".join(f" {wiki(paragraph)} \n \n" for paragraph in page)
        for name, page in zip(names, pages, strict=True)
    ]
    text = " \n" + "".join(parts)
    plain = "\n" + "".join(
        f"= {name} =\n\n" + "".join(f"{paragraph}\n\n" for paragraph in page)
        for name, page in zip(names, pages, strict=True)
    )
    (tmp_path / "wiki.test.raw").write_text(text)
    lines = evaluate(directory, f"wikitext2:{tmp_path}/wiki.test.raw")

    ids = scores.encode(plain)
    assert len(ids) > 900  # three windows and a part
    loss = loss_in_windows(scores, ids, 300)  # nothing predicts the first token
    words, ends = len(text.split()), text.count("\n")
    for metric, expected in {
        "word_perplexity": math.exp(loss / (words + ends)),
        "word_perplexity_without_line_ends": math.exp(loss / words),
        "token_perplexity": math.exp(loss / (len(ids) - 1)),
        "bits_per_byte": loss / len(text.encode()) / math.log(2),
    }.items():
        assert value(lines, metric=metric) == pytest.approx(expected, rel=1e-4), metric
