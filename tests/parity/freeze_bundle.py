"""Write tests/golden/tensorflow/ with TensorFlow (the extra [tfds]): `cd tests && python -m parity.freeze_bundle`.

Two small checkpoints with the variables of google-research/bert and openai/gpt-2, numbers drawn by name.
"""

import json
from pathlib import Path

import tensorflow as tf

from parity import bundle_case as case

FOLDER = Path(__file__).resolve().parent.parent / "golden" / "tensorflow"


def main() -> None:
    """Write both, with the files that lie beside them."""
    for name, prefix, variables in (
        ("bert", "bert_model.ckpt", case.bert_variables()),
        ("gpt2", "model.ckpt", case.gpt2_variables()),
    ):
        directory = FOLDER / name
        directory.mkdir(parents=True, exist_ok=True)
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            made = [tf.compat.v1.get_variable(key, initializer=value) for key, value in variables.items()]
            session.run(tf.compat.v1.variables_initializer(made))
            saver = tf.compat.v1.train.Saver(made)
            saver.save(session, str(directory / prefix), write_meta_graph=False, write_state=False)
        for file, values in case.FILES[name].items():
            (directory / file).write_text(json.dumps(values, indent=1) + "\n")
        print(sorted(path.name for path in directory.iterdir()))


if __name__ == "__main__":
    main()
