"""The names of the columns of a task's files."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Columns:
    """The names under which a row's fields are found, each with its accepted alternatives.

    texts, choices: one tuple of names for each text and each choice. choice_list: names of one JSON field that holds
    all choices as a list. label: names of the label's column. whole: where the texts are sentences that are joined by
    spaces into one text, the names of a JSON field that holds the joined text. label_separator: separator of the labels
    in one field, where an example has any number of them; empty where it has one.
    """

    texts: tuple[tuple[str, ...], ...] = ()
    choices: tuple[tuple[str, ...], ...] = ()
    choice_list: tuple[str, ...] = ()
    label: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    label_separator: str = ""

    def describe(self) -> str:
        """Return the columns a file must have, for messages: `sentence1 (or premise), sentence2 (or hypothesis)`."""
        fields = [names[0] + (f" (or {', '.join(names[1:])})" if names[1:] else "") for names in self.texts]
        if self.choices:
            first, last = self.choices[0][0], self.choices[-1][0]
            fields.append(
                first if first == last else f"{first} to {last}" if len(self.choices) > 2 else f"{first}, {last}"
            )
        if self.choice_list:
            fields.append(("or in JSONL a list " if self.choices else "a list ") + self.choice_list[0])
        return ", ".join(fields)
