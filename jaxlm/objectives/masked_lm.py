"""BERT's pretraining objectives: masked tokens, the next sentence, and the left-to-right ablation."""

import jax.numpy as jnp
import numpy as np

from jaxlm.data.batch import PairBatch
from jaxlm.models.bert import Bert
from jaxlm.models.heads import MaskedLMHead, NextSentenceHead, take_places
from jaxlm.nn.cross_entropy import loss_pieces, projected_cross_entropy
from jaxlm.objectives.masking import MaskingConfig, Specials, mask_tokens
from jaxlm.objectives.objective import Objective, Sums, apply, cross_entropy


def masked_language_model(
    model: Bert,
    masked_lm: MaskedLMHead,
    next_sentence: NextSentenceHead | None,
    *,
    masking: MaskingConfig,
    specials: Specials,
    continues: np.ndarray | None,
    slots: int,
    next_sentence_coefficient: float = 1.0,
    loss_chunks: int = 0,
) -> Objective:
    """BERT's pretraining (section 3.1): masked words and, unless `next_sentence` is None, whether B follows A.

    Each term is a mean over its own weight, the masked tokens and the pairs of the whole batch. Parameters:
    {"backbone", "head": {"masked_lm", "next_sentence"}}. Masks come from the batch's own seeds, so evaluation sees the
    same ones whenever it is done. slots: the most masked tokens of a row.
    """
    vocab_size = model.config.vocab_size

    def masked(batch: PairBatch):
        return mask_tokens(batch, masking, specials, vocab_size, continues, slots)

    def weights(batch: PairBatch) -> Sums:
        predicted, pairs = jnp.sum(masked(batch).weights_BM), jnp.sum(batch.pair_weights)
        found = {"masked_lm_loss": predicted, "masked_lm_accuracy": predicted}
        return (
            found if next_sentence is None else found | {"next_sentence_loss": pairs, "next_sentence_accuracy": pairs}
        )

    def sums(params, batch: PairBatch, key) -> Sums:
        rows = masked(batch)
        inputs = (rows.ids_BL, batch.positions, batch.types, batch.segments)
        h_BLD, table_VD = apply(model, params["backbone"], *inputs, train=key is not None, key=key)
        states_BMD = take_places(h_BLD, rows.where_BM)
        nll, hits = masked_lm_loss(
            masked_lm, params["head"]["masked_lm"], states_BMD, table_VD, rows.targets_BM, rows.weights_BM, loss_chunks
        )
        found: Sums = {"masked_lm_loss": nll, "masked_lm_accuracy": hits}
        if next_sentence is None:
            return found
        pooled_BPD = apply(model, params["backbone"], take_places(h_BLD, batch.firsts), method=Bert.pool)
        scores_BP2 = apply(next_sentence, params["head"]["next_sentence"], pooled_BPD)
        right_BP = jnp.argmax(scores_BP2, axis=-1) == batch.next_labels
        return found | {
            "next_sentence_loss": jnp.sum(batch.pair_weights * cross_entropy(scores_BP2, batch.next_labels)),
            "next_sentence_accuracy": jnp.sum(batch.pair_weights * right_BP),
        }

    coefficients = {"masked_lm_loss": 1.0}
    if next_sentence is not None:
        coefficients["next_sentence_loss"] = next_sentence_coefficient
    return Objective(coefficients, weights, sums)


def masked_lm_loss(head: MaskedLMHead, params, states_BMD, table_VD, targets_BM, weights_BM, loss_chunks: int = 0):
    """The sums of weighted negative log-likelihoods (nats) and hits of the tokens that stood at M places of each row.

    Where `loss_chunks` does not divide M, places of weight 0 are added.
    """
    h_BMD, bias_V = apply(head, params, states_BMD)
    rows, places, _ = h_BMD.shape
    pieces = min(loss_pieces(loss_chunks, rows, places, table_VD), places)
    if extra := -places % pieces:
        pad = lambda x: jnp.pad(x, ((0, 0), (0, extra), *[(0, 0)] * (x.ndim - 2)))  # noqa: E731
        h_BMD, targets_BM, weights_BM = pad(h_BMD), pad(targets_BM), pad(weights_BM)
    return projected_cross_entropy(h_BMD, table_VD, targets_BM, weights_BM, pieces, bias_V)


def left_to_right_language_model(model: Bert, masked_lm: MaskedLMHead, *, loss_chunks: int = 0) -> Objective:
    """The paper's ablation "LTR & No NSP" (section 5.1): the same encoder under a causal mask predicts the next token.

    Every token of a pair after its first is predicted from those before it, CLS and both SEP being of the text. The
    paper names the objective and leaves the rest of BERT as it is: so the masked LM's head stands before the table here
    too, where GPT-1 has none, and a checkpoint has the same parameters.
    """

    def counted(batch: PairBatch):
        next_segments = jnp.pad(batch.segments[:, 1:], ((0, 0), (0, 1)))
        return ((batch.segments > 0) & (batch.segments == next_segments)).astype(jnp.float32)

    def weights(batch: PairBatch) -> Sums:
        total = jnp.sum(counted(batch))
        return {"nll": total, "accuracy": total}

    def sums(params, batch: PairBatch, key) -> Sums:
        inputs = (batch.ids, batch.positions, batch.types, batch.segments)
        h_BLD, table_VD = apply(model, params["backbone"], *inputs, train=key is not None, key=key)
        targets_BL = jnp.pad(batch.ids[:, 1:], ((0, 0), (0, 1)))
        head = params["head"]["masked_lm"]
        nll, hits = masked_lm_loss(masked_lm, head, h_BLD, table_VD, targets_BL, counted(batch), loss_chunks)
        return {"nll": nll, "accuracy": hits}

    return Objective({"nll": 1.0}, weights, sums)
