"""Tasks without fine-tuning: how well a language model predicts the texts of a task.

A task is a function from a model and a file to measured values (`task.py`). The other modules hold the tasks, grouped
by what they compare: `continuations.py` endings, labels and the end of a passage, `minimal_pairs.py` sentences,
`pronouns.py` referents, `running_text.py` language-model texts, `prompted.py` generated answers.
Radford et al., 2018 (section 5) and 2019 (section 3).
"""
