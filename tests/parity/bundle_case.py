"""The variables of Google's BERT and OpenAI's GPT-2 at toy sizes, by the names of their code, numbers drawn by name."""

import zlib

import numpy as np

WIDTH, LAYERS, VOCABULARY, POSITIONS = 8, 2, 23, 7

BERT_CONFIG = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": 12,
    "max_position_embeddings": POSITIONS,
    "num_attention_heads": 2,
    "num_hidden_layers": LAYERS,
    "type_vocab_size": 2,
    "vocab_size": VOCABULARY,
}
HPARAMS = {"n_vocab": VOCABULARY, "n_ctx": POSITIONS, "n_embd": WIDTH, "n_head": 2, "n_layer": LAYERS}
FILES = {"bert": {"bert_config.json": BERT_CONFIG}, "gpt2": {"hparams.json": HPARAMS}}


def numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 numbers that follow from a name."""
    return np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape).astype(np.float32)


def bert_variables() -> dict[str, np.ndarray]:
    """As google-research/bert saves them, the optimizer's state among them."""
    inner = BERT_CONFIG["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "bert/embeddings/word_embeddings": (VOCABULARY, WIDTH),
        "bert/embeddings/token_type_embeddings": (2, WIDTH),
        "bert/embeddings/position_embeddings": (POSITIONS, WIDTH),
        "bert/pooler/dense/kernel": (WIDTH, WIDTH),
        "bert/pooler/dense/bias": (WIDTH,),
        "cls/predictions/transform/dense/kernel": (WIDTH, WIDTH),
        "cls/predictions/transform/dense/bias": (WIDTH,),
        "cls/predictions/output_bias": (VOCABULARY,),
        "cls/seq_relationship/output_weights": (2, WIDTH),
        "cls/seq_relationship/output_bias": (2,),
    }
    norms = ["bert/embeddings/LayerNorm", "cls/predictions/transform/LayerNorm"]
    for n in range(LAYERS):
        layer = f"bert/encoder/layer_{n}"
        dense = {f"attention/self/{name}": (WIDTH, WIDTH) for name in ("query", "key", "value")}
        dense |= {"attention/output/dense": (WIDTH, WIDTH), "intermediate/dense": (WIDTH, inner)}
        for name, shape in (dense | {"output/dense": (inner, WIDTH)}).items():
            shapes |= {f"{layer}/{name}/kernel": shape, f"{layer}/{name}/bias": shape[1:]}
        norms += [f"{layer}/attention/output/LayerNorm", f"{layer}/output/LayerNorm"]
    for norm in norms:
        shapes |= {f"{norm}/beta": (WIDTH,), f"{norm}/gamma": (WIDTH,)}
    shapes |= {f"bert/pooler/dense/bias/adam_{kind}": (WIDTH,) for kind in "mv"}
    found = {name: numbers(name, shape) for name, shape in shapes.items()}
    return found | {"global_step": np.array(20, np.int64)}


def gpt2_variables() -> dict[str, np.ndarray]:
    """As openai/gpt-2 saves them."""
    shapes: dict[str, tuple[int, ...]] = {"model/wte": (VOCABULARY, WIDTH), "model/wpe": (POSITIONS, WIDTH)}
    norms = ["model/ln_f"]
    for n in range(LAYERS):
        layer = f"model/h{n}"
        for name, (inputs, outputs) in {
            "attn/c_attn": (WIDTH, 3 * WIDTH),
            "attn/c_proj": (WIDTH, WIDTH),
            "mlp/c_fc": (WIDTH, 4 * WIDTH),
            "mlp/c_proj": (4 * WIDTH, WIDTH),
        }.items():
            shapes |= {f"{layer}/{name}/w": (1, inputs, outputs), f"{layer}/{name}/b": (outputs,)}
        norms += [f"{layer}/ln_1", f"{layer}/ln_2"]
    for norm in norms:
        shapes |= {f"{norm}/g": (WIDTH,), f"{norm}/b": (WIDTH,)}
    return {name: numbers(name, shape) for name, shape in shapes.items()}
