"""Generated answers: prompts, generation against a loop over whole logits, and scores against their libraries."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import toy
from toy_run import toy_tokenizer

from jaxlm.distributed.mesh import MeshConfig, make_mesh
from jaxlm.errors import InputError
from jaxlm.models import build
from jaxlm.models.model import Inputs
from jaxlm.nn.config import Execution
from jaxlm.zero_shot import prompted
from jaxlm.zero_shot.model import Continuation, Continuer, Query, ZeroShotModel
from jaxlm.zero_shot.prompted import (
    PROMPTED,
    PromptedTask,
    conversation_scores,
    first_sentence,
    first_sentences,
    open_scores,
)
from jaxlm.zero_shot.prompted_rows import Row, open_questions, read_template, reading_questions, sentence_pairs

TASKS: dict[str, PromptedTask] = {task.name: task for task in prompted._PROMPTED}
DATA = Path(os.environ.get("JAXLM_DATA", ".data"))
QUESTIONS = [
    {"question": "who saw a crow", "answer": ["The fox", "a fox"]},
    {"question": "where lay the dog?", "answer": "on the rug"},
    {"question": "what sang", "answer": ["The bird"]},
]
COQA = {
    "data": [
        {
            "id": "s1",
            "story": "The cat sat on the mat.",
            "questions": [{"input_text": "Who sat?"}, {"input_text": "Where?"}],
            "answers": [{"input_text": "the cat"}, {"input_text": "on the mat"}],
            "additional_answers": {"0": [{"input_text": "a cat"}, {"input_text": "mat"}]},
        }
    ]
}
SQUAD = {
    "data": [
        {
            "title": "Cats",
            "paragraphs": [
                {
                    "context": "The cat sat on the mat.",
                    "qas": [
                        {"id": "a", "question": "Who sat? ", "answers": [{"text": "The cat", "answer_start": 0}]},
                        {"id": "b", "question": "Why?", "answers": [], "is_impossible": True},
                    ],
                }
            ],
        }
    ]
}
ARTICLES = [{"article": "The fox went over the hill. It saw a crow.", "highlights": "A fox saw a crow.\nIt went."}] * 2


@pytest.fixture(scope="module")
def model():
    tokenizer = toy_tokenizer()
    config = replace(toy.STILL, vocab_size=tokenizer.size, num_positions=160)
    network = build(config, Execution(dtype="float32"))
    found = ZeroShotModel(
        network, tokenizer, mesh=make_mesh(MeshConfig(), jax.devices()[:1]), batch_size=2, show_progress=False
    )
    found.params = toy.random_params(config)
    return found


@pytest.fixture(scope="module")
def probs_after(model):
    """ids -> the probability of each next id, (V,), float64."""
    positions = model.positions

    @jax.jit
    def logits(ids, last):
        outputs = model.model(model.params, Inputs(ids, np.arange(positions)[None]))
        return outputs.states[0, last] @ outputs.output.tokens[0].T

    def run(ids):
        padded = np.zeros((1, positions), np.int32)
        padded[0, : len(ids)] = ids
        scores = np.exp(np.asarray(logits(padded, len(ids) - 1), np.float64))
        return scores / scores.sum()

    return run


def options(**given):
    return SimpleNamespace(
        **({"prompt": None, "prompt_examples": None, "prompt_rows": None, "seed": 0, "sample": None} | given)
    )


def write(path, rows):
    text = json.dumps(rows) if isinstance(rows, dict) else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text if not isinstance(rows, str) else rows, encoding="utf-8")
    return path


def queries(name, path, **given):
    """The prompts that a task makes of a file, and the rows that it scores."""
    task = TASKS[name]
    chosen = options(**given)
    examples, scored, how = task._examples(path, task.read(path)[0], chosen)
    template = read_template(name, chosen.prompt, task.fields)
    return [task._query(template, examples, row) for row in scored], scored, how


def test_continuations_are_the_likeliest_tokens_up_to_the_stop(model, probs_after):
    """Fails when prompts are padded wrongly, put back in another order, stopped late, or when a special id is taken."""
    texts = ["The cat", "In the morning the fox lay in the tree", "It saw a crow."]
    specials = set(model.tokenizer.specials.values()) - {model.tokenizer.specials["end"]}
    expected = []
    for text in texts:
        ids, new = model.tokenizer.encode(text), []
        while len(new) < 6 and (not new or new[-1] != model.tokenizer.specials["end"]):
            scores = probs_after(ids + new)
            scores[list(specials)] = -1
            new.append(int(scores.argmax()))
        expected.append(new)
    found = Continuer(model, length=6)([Query(text, "row") for text in texts])
    assert [one.ids for one in found] == expected
    whole = [
        model.tokenizer.decode(model.tokenizer.encode(text) + ids) for text, ids in zip(texts, expected, strict=True)
    ]
    assert [one.text for one in found] == [text[len(first) :] for text, first in zip(whole, texts, strict=True)]
    stop = next(one.text[2] for one in found if len(one.text) > 3)
    ended = Continuer(model, length=6, stop=(stop,))([Query(text, "row") for text in texts])
    for one, stopped in zip(found, ended, strict=True):
        assert stopped.text == one.text.partition(stop)[0]
    probability = math.prod(
        probs_after(model.tokenizer.encode(texts[0]) + expected[0][:k])[i] for k, i in enumerate(expected[0])
    )
    assert Continuer(model, length=6).log_probabilities(found[:1])[0] == pytest.approx(math.log(probability), abs=1e-3)


def test_a_prompt_that_is_too_long_loses_its_beginning_or_the_end_of_its_document(model):
    text = "the cat sat on the mat and the dog lay on the rug " * 12
    continuer = Continuer(model, length=10)
    (whole,) = continuer([Query(text, "row")])
    assert whole.shortened and whole.prompt == model.tokenizer.encode(text)[-150:]
    query = Query(f"Begin {text}\nTL;DR:", "row", slice(6, 6 + len(text)))
    (article,) = continuer([query])
    assert article.shortened and len(article.prompt) <= 150
    decoded = model.tokenizer.decode(article.prompt)
    assert decoded.startswith("Begin") and decoded.endswith("TL;DR:")
    assert not continuer([Query("The cat", "row")])[0].shortened
    with pytest.raises(InputError, match="a continuation of 160 tokens must fit in the 160 positions"):
        Continuer(model, length=160)([Query("The cat", "row 1")])


def test_prompts_of_question_answer_pairs(tmp_path):
    """Fails when an example is scored too, or when a question mark is doubled."""
    path = write(tmp_path / "nq.jsonl", QUESTIONS)
    (query,), rows, how = queries("nq_open", path, prompt_examples=2)
    assert query.text == "Q: who saw a crow?\nA: The fox\nQ: where lay the dog?\nA: on the rug\nQ: what sang?\nA:"
    assert rows[0].answers == ("The bird",) and "rows 1 to 2 of" in how["example_rows"]
    found, rows, how = queries("nq_open", path, prompt_examples=1, prompt_rows=write(tmp_path / "t", QUESTIONS[2:]))
    assert len(found) == len(rows) == 3 and found[0].text == "Q: what sang?\nA: The bird\nQ: who saw a crow?\nA:"
    own = tmp_path / "own.txt"
    own.write_text("{question} = {answer};\n")
    assert queries("nq_open", path, prompt_examples=1, prompt=own)[0][0].text == (
        "who saw a crow = The fox;\nwhere lay the dog ="
    )


def test_prompts_of_documents(tmp_path):
    squad = write(tmp_path / "squad.json", SQUAD)
    assert [one.text for one in queries("squad", squad)[0]] == ["The cat sat on the mat.\nQ: Who sat?\nA:"]
    assert reading_questions(squad)[1] == 1  # without an answer
    coqa = write(tmp_path / "coqa.json", COQA)
    assert [one.text for one in queries("coqa", coqa)[0]] == [
        "The cat sat on the mat.\nQ: Who sat?\nA:",
        "The cat sat on the mat.\nQ: Who sat?\nA: the cat\nQ: Where?\nA:",
    ]
    articles = write(tmp_path / "articles.jsonl", ARTICLES)
    found = queries("summarization", articles, prompt_examples=1)[0][0]
    assert found.text.endswith("A fox saw a crow.\nIt went.\nThe fox went over the hill. It saw a crow.\nTL;DR:")
    assert found.text[found.document] == ARTICLES[0]["article"] and found.document.start > 50


def test_prompts_of_sentence_pairs(tmp_path):
    source, reference = tmp_path / "src.en.sgm", tmp_path / "ref.fr.sgm"
    for path, words in ((source, ("A cat", "A &amp; b")), (reference, ("Un chat", "Un chien. Deux"))):
        segments = "".join(f'<seg id="{k}">{text}</seg>\n' for k, text in enumerate(words, 1))
        path.write_text(f'<srcset setid="x">\n<doc docid="d">\n{segments}</doc>\n</srcset>\n')
    (query,), rows, _ = queries("translation", Path(f"{source},{reference}"), prompt_examples=1)
    assert query.text == "A cat = Un chat\nA & b =" and rows[0].answers == ("Un chien. Deux",)
    assert first_sentence(Path(f"{source},{reference}"), " Un chien. Deux chats.") == "Un chien."
    source, reference = write(tmp_path / "a.en", "one\ntwo\n"), write(tmp_path / "b.de", "eins\nzwei\n")
    plain = Path(f"{source},{reference}")
    assert [row.fields["source"] for row in sentence_pairs(plain)[0]] == ["one", "two"]


def test_the_first_sentences_are_lines():
    assert first_sentences(Path("x"), " A cat  sat. It\nruns. And so. More.") == "A cat sat.\nIt runs.\nAnd so."


def test_conversation_scores_leave_each_answer_out_in_turn():
    """By hand: without `cat` the best of the others is 2/3, twice it is 1. Fails when the best over all is taken."""
    exact, f1 = conversation_scores("The cat", ["cat", "black cat", "dog"])
    assert exact == pytest.approx(2 / 3) and f1 == pytest.approx((2 / 3 + 1 + 1) / 3)
    assert conversation_scores("a dog", ["the dog"]) == (1.0, 1.0)


def test_calibration_is_by_confidence():
    """Fails when deciles are in the order of the file, or when the surest answers are the least sure."""
    answers = ["yes" if k % 4 else "no" for k in range(40)]
    rows = [Row({}, ("yes",), "row")] * 40
    continuations = [Continuation("", [1], [k], False) for k in range(40)]
    sure = np.random.default_rng(0).permutation(40) / 40 + 0.01
    fake = SimpleNamespace(log_probabilities=lambda some: [math.log(sure[one.ids[0]]) for one in some])
    exact, surest = open_scores(fake, continuations, answers, rows)
    assert exact.value == 0.75 and surest.value == float(answers[int(sure.argmax())] == "yes")
    curve = exact.how["calibration"]
    order = sorted(range(40), key=lambda k: sure[k])
    for decile, part in enumerate(curve):
        some = order[4 * decile : 4 * decile + 4]
        assert part["questions"] == 4 and part["confidence"] == pytest.approx(np.mean([sure[k] for k in some]))
        assert part["exact_match"] == np.mean([answers[k] == "yes" for k in some])


def test_every_task_gives_values_that_say_how(model, tmp_path):
    """Fails when a task does not run from its file to its values, or does not name its rows."""
    source, reference = write(tmp_path / "a.en", "A cat\nA dog\nThe fox\n"), write(tmp_path / "b.de", "Ei\nHu\nFu\n")
    files = {
        "squad": (write(tmp_path / "squad.json", SQUAD), 2, 1, {"f1", "exact_match"}),
        "coqa": (write(tmp_path / "coqa.json", COQA), 2, 2, {"f1", "exact_match"}),
        "nq_open": (
            write(tmp_path / "nq.jsonl", QUESTIONS),
            3,
            2,
            {"exact_match", "exact_match_most_confident_1_percent"},
        ),
        "translation": (Path(f"{source},{reference}"), 3, 2, {"bleu"}),
        "summarization": (
            write(tmp_path / "cnn.jsonl", ARTICLES),
            2,
            2,
            {"rouge_1", "rouge_2", "rouge_l", "rouge_average"},
        ),
    }
    assert {task.name for task in PROMPTED} == set(files)
    for task in PROMPTED:
        path, examples, scored, metrics = files[task.name]
        shots = 1 if task.name in ("nq_open", "translation") else None
        found = list(task.measure(model, path, options(prompt_examples=shots)))
        assert {one.metric for one in found} == metrics
        for one in found:
            assert (one.examples, one.scored) == (examples, scored) and 0 <= one.value <= 100
            assert one.how["prompt"] == f"prompts/{task.name}.txt" and one.how["examples_in_prompt"] == (shots or 0)
        item = found[0].rows[-1].item()
        assert item["generated"].startswith(item["answer"][:1]) and item["references"] and "prompt" in item
        assert task.name == "translation" or np.mean(found[0].of_rows) == pytest.approx(found[0].value)
    assert found[0].how["sampling"] == "top-k 2, seed 0"
    (one, *_) = PROMPTED[0].measure(
        model, files["coqa" if PROMPTED[0].name == "coqa" else "squad"][0], options(sample=1)
    )
    assert one.scored == 1


@pytest.mark.parametrize(
    ("name", "content", "given", "message"),
    [
        ("nq_open", [{"question": "who"}], {}, "line 1: answer must be a list of texts"),
        ("nq_open", [{"question": " ", "answer": ["x"]}], {}, "line 1: question must be a text"),
        ("nq_open", QUESTIONS, {"prompt_examples": 3}, "--prompt-examples must be below the number of rows of"),
        ("nq_open", "", {}, "must have rows, got none"),
        ("summarization", [{"article": "x"}], {}, "line 1: highlights must be a text"),
        ("coqa", {"data": [{"story": "x"}]}, {}, "must have data, story, questions and answers"),
        ("coqa", "{", {}, "is not JSON"),
        ("translation", "x", {}, "must have two files with a comma between them"),
    ],
)
def test_bad_input_is_one_line(tmp_path, name, content, given, message):
    with pytest.raises(InputError, match=message) as raised:
        queries(name, write(tmp_path / "file", content), **given)
    assert "\n" not in str(raised.value)


def test_bad_prompts_and_parallel_files(tmp_path):
    own = write(tmp_path / "own.txt", "{question} {other}\n")
    with pytest.raises(InputError, match="must have the fields {question}, {answer} once"):
        read_template("nq_open", own, ("question",))
    one, two = write(tmp_path / "a.en", "x\n"), write(tmp_path / "a.fr", "x\ny\n")
    with pytest.raises(InputError, match="must have the 1 sentences of"):
        sentence_pairs(Path(f"{one},{two}"))
    blank = "x\n\n"
    with pytest.raises(InputError, match="line 2 must have a sentence"):
        sentence_pairs(Path(f"{write(one, blank)},{two}"))
    with pytest.raises(InputError, match="No such file"):
        sentence_pairs(Path(f"{tmp_path / 'none.en'},{two}"))


@pytest.mark.data
@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data at {DATA}")
def test_real_files_have_their_rows():
    """Fails when a reader loses rows of the published files."""
    wmt = DATA / "translation/wmt14"
    rows, _ = sentence_pairs(Path(f"{wmt}/newstest2014-fren-src.en.sgm,{wmt}/newstest2014-fren-ref.fr.sgm"))
    assert len(rows) == 3003 and rows[0].answers == ('Spectaculaire saut en "wingsuit" au-dessus de Bogota',)
    assert len(open_questions(DATA / "zeroshot/nq_open_dev.jsonl")[0]) == 3610
    rows, without = reading_questions(DATA / "squad/v1.1/dev.json")
    assert (len(rows), without) == (10570, 0)
